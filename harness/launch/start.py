"""Starts the processes of one job: run folder, environment, torchrun's agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import StoreError
from harness.launch import processes
from harness.launch.failure import AGENT_LOG, FAILURES_FILE
from harness.launch.options import RunOptions
from harness.launch.progress import MetricsTail
from harness.launch.run import Run
from harness.launch.warm import WarmServers
from harness.model import Job
from harness.store import RunLock, Store
from harness.trainers import (
    Resources,
    argv,
    environment,
    job_payload,
    metrics_files,
    torchrun_arguments,
)

AGENT_MODULE = "harness.rank.agent"
"""torchrun's agent, tied to the life of the harness."""


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
    options = place.options
    folder = place.store.run_folder(job.name, job.identity).absolute()
    payload = job_payload(
        job,
        folder,
        data=options.data_of(job),
        seed_checkpoint=seed_checkpoint or job.starts_from,
        device=options.device,
    )
    place.store.start_run(folder, payload)
    devices = slots if options.gpus else ()
    resources = Resources(device=options.device, devices=devices, loopback=place.loopback)
    variables = environment(place.environment, resources, folder)
    variables["CONVERGE_FAILURES"] = str(folder / "logs" / FAILURES_FILE)
    stand_in = place.servers.python(job.toolchain.name)
    if stand_in is not None:
        variables["PYTHON_EXEC"] = str(stand_in)  # what torchrun starts its ranks with
    command = (
        str(stand_in or job.toolchain.python),
        *("-m", AGENT_MODULE),
        *torchrun_arguments(job, folder, options.rank_module),
    )
    try:
        process = processes.start(command, variables, folder, folder / "logs" / AGENT_LOG)
    except OSError as error:
        raise StoreError(f"{folder}: cannot start {command[0]}: {error}") from error
    return Run(
        job=job,
        folder=folder,
        argv=argv(job, folder, options.rank_module),
        slots=slots,
        attempt=attempt,
        lock=lock,
        process=process,
        warm=stand_in is not None,
        environment=environment({}, resources, folder),
        payload=payload,
        tail=MetricsTail(metrics_files(folder)),
    )
