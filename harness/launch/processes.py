"""Starting a job's processes, and ending all of them for certain.

Ranks live in sessions of their own, and those of a warm start are children of another process than
torchrun's agent. What those of one agent share is their working directory: the run folder, or for
further nodes of a run the agent's log folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

_REAP_TIMEOUT_S = 10.0
_STACKS_S = 0.5


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    output: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, so that Ctrl-C reaches the harness only.

    What it prints is appended to ``log``; ``output`` takes its standard output alone.
    Raises OSError when the program or a file cannot be opened.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors, (output or log).open("ab") as stream:
        return subprocess.Popen(
            argv,
            env={**environment, "CONVERGE_PARENT": str(os.getpid())},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=errors,
            start_new_session=True,
        )


def ask_for_stacks(
    jobs: Iterable[tuple[subprocess.Popen[bytes], Path]], by: signal.Signals = signal.SIGUSR1
) -> None:
    """Have every rank of jobs write to its log where it is (``faulthandler``), and let it.

    ``by`` is SIGUSR1 for ranks of ours, and SIGABRT for others, which end by it.
    """
    for process in _ranks_of(jobs):
        try:
            process.send_signal(by)
        except psutil.NoSuchProcess:
            continue
    time.sleep(_STACKS_S)


def ask_to_end(agent: subprocess.Popen[bytes]) -> None:
    """SIGTERM of an agent, which hands it on to its ranks."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)


def end_all(jobs: Iterable[tuple[subprocess.Popen[bytes], Path]], grace_s: float | None) -> None:
    """End jobs, each an agent and the folder its ranks work in, and wait for all to be gone.

    By SIGTERM, grace, SIGKILL; without a grace (None) by SIGKILL at once, as a lost node goes.
    Returns when no process of theirs is left (or one is stuck in the kernel for 10 s).
    """
    jobs = list(jobs)
    if not jobs:
        return
    agents = [agent for agent, _ in jobs]
    doomed = _ranks_of(jobs)
    if grace_s is not None:
        for agent in agents:
            ask_to_end(agent)
        psutil.wait_procs(doomed, timeout=grace_s)
        _wait(agents, grace_s)
    doomed |= _ranks_of(jobs)  # started between the two
    for process in doomed:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for agent in agents:
        agent.kill()
    psutil.wait_procs(doomed, timeout=_REAP_TIMEOUT_S)
    _wait(agents, _REAP_TIMEOUT_S)


def _wait(agents: Iterable[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for agent in agents:
        try:
            agent.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue


def _ranks_of(jobs: Iterable[tuple[subprocess.Popen[bytes], Path]]) -> set[psutil.Process]:
    """Our descendants that belong to the jobs, by descent from an agent or by run folder.

    Without the agents: those are ours to wait for, and psutil would take their exit codes.
    """
    agents = {agent.pid for agent, _ in jobs}
    folders = {folder.resolve() for _, folder in jobs}
    found: set[psutil.Process] = set()
    for pid in agents:
        try:
            found |= set(psutil.Process(pid).children(recursive=True))
        except psutil.NoSuchProcess:
            continue
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid not in agents and Path(process.cwd()) in folders:
                found.add(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
