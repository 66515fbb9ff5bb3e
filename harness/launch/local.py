"""Runs a plan on this machine: reuse, warm start, check, then torchrun jobs packed into slots."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from harness.errors import ConfigError, Problem, StoreError
from harness.launch.check import check_jobs, count_of, unchecked
from harness.launch.events import Notice, Observer, Preparing, Queued, Reused
from harness.launch.interruption import Interruption, interruptible
from harness.launch.options import RunOptions
from harness.launch.private import private_folder, remove_left_behind
from harness.launch.slots import Slots, cpu_slots
from harness.launch.start import Place
from harness.launch.supervisor import Supervisor
from harness.launch.warm import WarmServers
from harness.model import Job, Plan, RunRecord, RunStatus
from harness.seal import stale
from harness.store import Store
from harness.trainers import Resources, environment, is_complete


def run_plan(
    plan: Plan, store: Store, options: RunOptions, observer: Observer
) -> tuple[RunRecord, ...]:
    """Bring every job of a plan to a record, in the plan's order.

    Jobs that have finished with the same identity are reused and start no process. Call it in the
    main thread: the kernel ties the life of the processes to the thread that started them.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was launched.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        Interrupted: Ctrl-C or a signal; no process is left, and finished runs are kept.
    """
    remove_left_behind()  # also where nothing is left to run
    records, others = ({}, {}) if options.fresh else finished_runs(plan.jobs, store)
    for identity, why in others.items():
        name = next(job.name for job in plan.jobs if job.identity == identity)
        observer(Notice(time.time(), f"{name} runs again: {why}"))
    for job in plan.jobs:
        if job.identity in records:
            observer(Reused(time.time(), job, replace(records[job.identity], name=job.name)))
    pending = {job.identity: job for job in plan.jobs if job.identity not in records}
    if pending:
        jobs = tuple(pending.values())
        require_seed_checkpoints(jobs, records, store)
        store.require_writable()
        with interruptible() as stop:
            records = _run(plan, jobs, records, store, options, observer, stop)
    return tuple(replace(records[job.identity], name=job.name) for job in plan.jobs)


def finished_runs(jobs: Sequence[Job], store: Store) -> tuple[dict[str, RunRecord], dict[str, str]]:
    """Records of earlier runs that can be taken as they are, by identity.

    Then, by identity, why others that have finished cannot: their evidence or something that they
    were made of has changed since. Raises StoreError for a damaged record or one of a newer schema.
    """
    found: dict[str, RunRecord] = {}
    others: dict[str, str] = {}
    for job in {job.identity: job for job in jobs}.values():
        record = store.record(job.identity)
        if record is None or record.status is not RunStatus.FINISHED:
            continue
        if why := stale(record):
            others[job.identity] = why
        elif is_complete(job, record.folder):
            found[job.identity] = replace(record, reused=True)
    return found, others


def _run(
    plan: Plan,
    jobs: tuple[Job, ...],
    records: Mapping[str, RunRecord],
    store: Store,
    options: RunOptions,
    observer: Observer,
    stop: Interruption,
) -> dict[str, RunRecord]:
    inherited = dict(os.environ)
    loopback = _loopback()
    common = environment(inherited, Resources(device=options.device, loopback=loopback))
    slots = _slots(plan, jobs, options)
    with private_folder() as private, closing(WarmServers(common, options.device)) as servers:
        warmed = tuple(job for job in jobs if job.spec.trainer.can.warm_start)
        toolchains = {job.toolchain.name: job.toolchain for job in warmed}
        if options.warm and not options.gpus:
            for name, toolchain in toolchains.items():
                observer(Preparing(time.time(), f"loading {name} once for all its ranks"))
                servers.want(name, toolchain.python, toolchain.dialect)
        asked = tuple(job for job in jobs if job.spec.trainer.can.checks_config)
        to_check = unchecked(asked, store) if options.check else ()
        if to_check:
            observer(Preparing(time.time(), f"checking {count_of(to_check)}"))
            check_jobs(to_check, store, options, inherited, servers, stop)
        for job in jobs:
            observer(Queued(time.time(), job))
        place = Place(store, options, servers, inherited, loopback, private)
        return Supervisor(plan.experiment, place, slots, observer).run(jobs, records, stop)


def _slots(plan: Plan, jobs: Sequence[Job], options: RunOptions) -> Slots:
    """GPUs, or places on the CPU.

    Raises ConfigError when a job wants more GPUs than there are.
    """
    if options.gpus:
        problems = [
            Problem(job.name, f"wants {job.world_size} GPUs, there are {len(options.gpus)}")
            for job in jobs
            if job.world_size > len(options.gpus)
        ]
        if problems:
            raise ConfigError(problems)
        return Slots(tuple(sorted(options.gpus)))
    cores = len(os.sched_getaffinity(0))
    return cpu_slots(cores, jobs, plan.experiment.cpu_ranks)


def require_seed_checkpoints(
    jobs: Sequence[Job], records: Mapping[str, RunRecord], store: Store
) -> None:
    """Raise StoreError when a job's initial weights are neither planned nor there."""
    known = {*records, *(job.identity for job in jobs)}
    for job in jobs:
        if job.needs is not None and job.needs not in known:
            raise StoreError(
                f"{job.name} starts from the seed checkpoint {job.needs[:12]}, which is neither in "
                f"the plan nor finished in {store.root}"
            )


def _loopback() -> str | None:
    """Name of the loopback interface where there is one: all ranks are on this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
