"""Starting a job's processes, and reliably ending all of them.

Ranks have their own sessions, and after a warm start they are not children of torchrun's agent.
What the ranks of one agent share is their working directory: the run folder, or for further nodes
of a run the agent's log folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from converge_harness.run_folder.layout import FAILURES, FAILURES_VARIABLE, PARENT_VARIABLE

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""By which launchers tell a rank its number: torchrun, Composer's and DeepSpeed's; Open MPI's and
MPICH's mpirun."""
_REAP_TIMEOUT_S = 10.0
_STACKS_S = 0.5


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    output: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that Ctrl-C reaches only converge.

    Its output is appended to ``log``; its standard output goes to ``output`` if given. Raises
    OSError if the program or a file cannot be opened.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as errors, (output or log).open("ab") as stream:
        return subprocess.Popen(
            argv,
            env={**environment, PARENT_VARIABLE: str(os.getpid())},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=errors,
            start_new_session=True,
        )


def ask_for_stacks(
    jobs: Iterable[tuple[subprocess.Popen[bytes], Path]], by: signal.Signals = signal.SIGUSR1
) -> None:
    """Make every rank of jobs write its stack to its log (``faulthandler``), and wait for it.

    ``by`` is SIGUSR1 for our ranks, and SIGABRT for others, which it ends.
    """
    for process in _ranks_of(jobs):
        try:
            process.send_signal(by)
        except psutil.NoSuchProcess:
            continue
    time.sleep(_STACKS_S)


def ranks_of(call: Path, agent: int, wanted: Collection[int]) -> dict[int, psutil.Process]:
    """The processes that a launcher started as ranks of a call, by rank; all ``wanted`` or none.

    ``call`` is its log folder and ``agent`` the process id that its launcher started, which adopts
    what its descendants leave behind. A rank has one of ``RANK_VARIABLES``, and the variable by
    which every process of the call inherits the path of its failures. What a rank has started has
    both, too: of such a process the parent has them, or, once the rank has ended, is the agent.

    If they are not below the agent, because a server has forked its launcher, all processes are
    looked at. Another container may have a run at the same path and share our process ids, so what
    sees other files is left out.
    """
    try:
        found = _ranks_among(psutil.Process(agent).children(recursive=True), call, agent)
    except psutil.NoSuchProcess:
        return {}
    if not found.keys() >= set(wanted):
        found = _ranks_among(filter(_sees_our_files, psutil.process_iter()), call, agent)
    return {rank: found[rank] for rank in wanted} if found.keys() >= set(wanted) else {}


def _ranks_among(
    processes: Iterable[psutil.Process], call: Path, agent: int
) -> dict[int, psutil.Process]:
    found: dict[int, tuple[psutil.Process, str]] = {}
    above: dict[int, int] = {}
    for process in processes:
        try:
            variables = process.environ()
            above[process.pid] = process.ppid()
        except (psutil.Error, OSError):  # it has ended, or is another user's
            continue
        rank = next(filter(None, map(variables.get, RANK_VARIABLES)), "")
        if rank.isdecimal() and variables.get(FAILURES_VARIABLE) == str(call / FAILURES):
            found[process.pid] = process, rank
    left = {agent, *found}
    return {int(rank): each for pid, (each, rank) in found.items() if above[pid] not in left}


def _sees_our_files(process: psutil.Process) -> bool:
    """Whether a process is in our mount namespace: containers have their own."""
    try:
        theirs, ours = (Path(f"/proc/{pid}/ns/mnt").readlink() for pid in (process.pid, "self"))
    except OSError:  # it has ended, or is another user's
        return False
    return theirs == ours


def signal_tree(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process and to all that it has started; does not wait for its effect."""
    try:
        reached = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in reached:
        try:
            each.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def ask_to_end(agent: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to an agent, which passes it on to its ranks."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)


def end_all(jobs: Iterable[tuple[subprocess.Popen[bytes], Path]], grace_s: float | None) -> None:
    """End jobs, each given as an agent and its ranks' working directory, and wait for all to end.

    By SIGTERM, then SIGKILL after ``grace_s``; without a grace (None) by SIGKILL immediately, as if
    a node were lost. Returns when none of their processes is left (or one has been stuck in the
    kernel for 10 s).
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
    """Descendants of converge that belong to the jobs, by their agent or by their run folder.

    Without the agents, for which we wait ourselves: psutil would take their exit codes.
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
