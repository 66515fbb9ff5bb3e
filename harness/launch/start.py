"""Starts the processes of one job: run folder, environment, torchrun's agents, call by call."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import StoreError
from harness.launch import processes
from harness.launch.call import Agent, RunningCall
from harness.launch.failure import AGENT_LOG, FAILURES_FILE
from harness.launch.options import RunOptions
from harness.launch.progress import MetricsTail
from harness.launch.run import Run, struck_faults
from harness.launch.torn import set_torn_aside
from harness.launch.warm import WarmServers
from harness.model import Job
from harness.store import RunLock, Store
from harness.trainers import (
    Call,
    Rendezvous,
    Resources,
    argv,
    comes_in_passes,
    environment,
    first_call,
    job_payload,
    most_nodes,
    torchrun_arguments,
)

AGENT_MODULE = "harness.rank.agent"
"""torchrun's agent, tied to the life of the harness."""
ARRIVED = "arrived"
"""In an agent's log folder: its imports are done."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where all jobs of a matrix run."""

    store: Store
    options: RunOptions
    servers: WarmServers
    environment: Mapping[str, str]
    """Of the harness: what jobs inherit."""
    loopback: str | None
    """Name of the loopback interface."""


def start_run(
    place: Place,
    job: Job,
    *,
    seed_checkpoint: Path | None,
    slots: tuple[int, ...],
    attempt: int,
    lock: RunLock,
) -> Run:
    """Start a job in an empty run folder.

    Raises StoreError when the folder cannot be written or the toolchain's Python not be started.
    """
    folder = place.store.run_folder(job.name, job.identity).absolute()
    payload = job_payload(
        job,
        folder,
        data=place.options.data_of(job),
        seed_checkpoint=seed_checkpoint,
        device=place.options.device,
    )
    place.store.start_run(folder, payload)
    return Run(
        job=job,
        folder=folder,
        slots=slots,
        attempt=attempt,
        lock=lock,
        call=_start_call(place, job, folder, first_call(job), slots),
        warm=place.servers.python(job.toolchain.name) is not None,
        environment=environment({}, _resources(place, slots), folder, job),
        payload=payload,
        tail=MetricsTail(folder, comes_in_passes(job)),
    )


def go_on(place: Place, run: Run, call: Call) -> None:
    """Start the next call of a run whose last one is over, in the same folder and slots.

    Raises StoreError as ``start_run`` does.
    """
    set_torn_aside(run.folder)
    following = _start_call(place, run.job, run.folder, call, run.slots)
    following.faults_before = struck_faults(run.folder)
    run.earlier.append(run.call)
    run.call = following


def start_node(place: Place, run: Run) -> None:
    """Have a further node join the call that runs.

    Raises StoreError as ``start_run`` does.
    """
    running = run.call
    node = len(running.agents)
    running.agents.append(
        _start_agent(place, run.job, run.folder, running.call, run.slots, running.endpoint, node)
    )


def _start_call(
    place: Place, job: Job, folder: Path, call: Call, slots: tuple[int, ...]
) -> RunningCall:
    endpoint = f"127.0.0.1:{_free_port()}" if most_nodes(job) > 1 else ""
    agents: list[Agent] = []
    try:
        agents.extend(
            _start_agent(place, job, folder, call, slots, endpoint, node, together=True)
            for node in range(call.nodes)
        )
    except BaseException:
        processes.end_all([(agent.process, agent.folder) for agent in agents], grace_s=None)
        raise
    meeting = _meeting(job, endpoint, 0)
    return RunningCall(
        call=call,
        argv=argv(job, folder, place.options.rank_module, call, meeting),
        endpoint=endpoint,
        agents=agents,
    )


def _start_agent(
    place: Place,
    job: Job,
    folder: Path,
    call: Call,
    slots: tuple[int, ...],
    endpoint: str,
    node: int,
    *,
    together: bool = False,
) -> Agent:
    """``together``: with the other first nodes of its call, for which it waits."""
    logs = _logs(job, folder, call, node)
    work = folder if node == 0 else logs
    variables = environment(place.environment, _resources(place, slots), folder, job)
    variables["CONVERGE_FAILURES"] = str(logs / FAILURES_FILE)
    if together and call.nodes > 1:
        others = (other for other in range(call.nodes) if other != node)
        arrived = [str(_logs(job, folder, call, one) / ARRIVED) for one in (node, *others)]
        variables["CONVERGE_TOGETHER"] = json.dumps(arrived)
    stand_in = place.servers.python(job.toolchain.name)
    if stand_in is not None:
        variables["PYTHON_EXEC"] = str(stand_in)  # what torchrun starts its ranks with
    meeting = _meeting(job, endpoint, node)
    command = (
        str(stand_in or job.toolchain.python),
        *("-m", AGENT_MODULE),
        *torchrun_arguments(job, folder, place.options.rank_module, call, meeting, logs),
    )
    try:
        logs.mkdir(parents=True, exist_ok=True)
        process = processes.start(command, variables, work, logs / AGENT_LOG)
    except OSError as error:
        raise StoreError(f"{folder}: cannot start {command[0]}: {error}") from error
    return Agent(process, work, logs)


def _logs(job: Job, folder: Path, call: Call, node: int) -> Path:
    """Each agent's own: a failure of an earlier call must not be taken for one of a later."""
    if not comes_in_passes(job):
        return folder / "logs"
    return folder / "logs" / (f"call-{call.number:02d}" + (f".node-{node}" if node else ""))


def _resources(place: Place, slots: tuple[int, ...]) -> Resources:
    options = place.options
    devices = slots if options.gpus else ()
    return Resources(device=options.device, devices=devices, loopback=place.loopback)


def _meeting(job: Job, endpoint: str, node: int) -> Rendezvous:
    recovery = job.spec.recovery
    if not endpoint or recovery is None:
        return Rendezvous()
    fewest, most = recovery.nodes
    return Rendezvous(fewest, most, endpoint, is_host=node == 0)


def _free_port() -> int:
    """A port that is free now: agents of several nodes have to know it before any of them runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
