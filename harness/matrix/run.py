"""Runs a plan's jobs, on this machine or under a scheduler, and waits for their records."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from converge_harness import corpus
from converge_harness.errors import ClusterError, ConfigError, ConvergeError, Problem
from converge_harness.launch import RunOptions, run_plan
from converge_harness.launch.backends import backend_of
from converge_harness.launch.events import Observer, Preparing
from converge_harness.launch.scheduler.follow import follow_plan
from converge_harness.launch.scheduler.job_status import Site
from converge_harness.launch.stopping import looks, read_by
from converge_harness.matrix.judge import evidence_of
from converge_harness.matrix.stop import look_at_running
from converge_harness.model import Evidence, Job, Launcher, Plan, RunRecord, SyntheticData
from converge_harness.readers import steps_so_far
from converge_harness.store import Store, read_record
from converge_harness.surroundings import gpus
from converge_harness.trainers.environment import SHARE_GPUS


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of running a plan."""

    records: tuple[RunRecord, ...]
    """In the plan's order."""
    data: Mapping[SyntheticData, corpus.PreparedData]
    kept: Mapping[str, Evidence] = field(default_factory=dict)
    """Evidence of runs that were stopped, by identity, as of then: another converge process may
    train them on before they are judged."""


def run_jobs(
    plan: Plan, store: Store, observer: Observer, *, fresh: bool = False, warm: bool = True
) -> Ran:
    """Run every job of the plan, here or on a cluster; finished ones are reused.

    Args:
        plan: a baseline's job is not run; its record is used.
        store: where runs are stored and reused from.
        observer: gets events while jobs run.
        fresh: run everything again, even what has finished with the same identity.
        warm: fork ranks from a process that has done the imports, where possible.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was launched.
        ClusterError: the scheduler cannot be reached.
        StoreError: the store cannot be read or written.
        Interrupted: a signal came.
    """
    if plan.experiment.launcher is Launcher.KUBERNETES:
        path = shlex.quote(str(plan.experiment.path))
        raise ConfigError(
            Problem(
                f"{path}: launcher",
                "is 'kubernetes', for which converge only writes objects: it cannot wait for jobs",
                f"write them with `converge submit {path}`, judge later with `converge collect "
                f"{path}`; or add --launcher local",
            )
        )
    data = prepare(plan, store, observer)
    options = options_of(plan, data, fresh=fresh, warm=warm)
    to_run = plan.without_baseline
    kept: dict[str, Evidence] = {}

    def read_stopped(job: Job, record: RunRecord) -> None:
        # What cannot be read now cannot be read later either, and is reported then.
        with suppress(ConvergeError):
            kept[job.identity] = evidence_of(job, record)

    if any(looks(job, plan.experiment) for job in plan.jobs):
        options = replace(
            options, look=look_at_running(plan), read_by=read_by(plan), read_stopped=read_stopped
        )
    if plan.experiment.launcher is Launcher.SLURM:
        records = follow_plan(to_run, site_of(plan, store, options, observer), observer)
    else:
        records = run_plan(to_run, store, options, observer)
    made = dict(zip((job.name for job in to_run.jobs), records, strict=True))
    return Ran(tuple(made.get(job.name) or baseline_record(job) for job in plan.jobs), data, kept)


def prepare(
    plan: Plan, store: Store, observer: Observer
) -> dict[SyntheticData, corpus.PreparedData]:
    """Report the number of jobs, and generate every missing corpus."""
    count = len(plan.without_baseline.jobs)
    observer(Preparing(time.time(), f"{plan.experiment.name}: {count} jobs"))
    return prepare_data(plan, store)


def prepare_data(plan: Plan, store: Store) -> dict[SyntheticData, corpus.PreparedData]:
    """Generate every corpus that the plan's jobs read, unless it exists."""
    used = dict.fromkeys(job.spec.train_config.data for job in plan.jobs)
    return {data: corpus.prepare(data, store.root / "data") for data in used if data is not None}


def options_of(
    plan: Plan,
    data: Mapping[SyntheticData, corpus.PreparedData],
    *,
    fresh: bool = False,
    warm: bool = True,
) -> RunOptions:
    """The options for running a plan with its launcher."""
    cluster = plan.experiment.cluster
    return RunOptions(
        data={values: prepared.folder for values, prepared in data.items()},
        gpus=_gpus_of(plan) if cluster is None else (),
        cluster_device=cluster.device if cluster else None,
        fresh=fresh,
        warm=warm,
        steps_so_far=steps_so_far,
    )


def gpu_ids() -> tuple[int, ...]:
    """GPUs that ranks may use; empty: they run on the CPU."""
    return tuple(gpus())


RANKS_PER_SHARED_GPU = 4
"""How many ranks run on a GPU at a time, unless the largest job or ``--slots`` asks for more."""


def _gpus_of(plan: Plan) -> tuple[int, ...]:
    """The GPU of every rank that runs at the same time; an id per GPU, unless ranks share them.

    They do if NCCL's own variable says so; without it NCCL refuses two ranks on one GPU.
    """
    ids = gpu_ids()
    if not ids or os.environ.get(SHARE_GPUS) != "1":
        return ids
    largest = max((job.world_size for job in plan.jobs), default=1)
    ranks = max(largest, plan.experiment.cpu_ranks or RANKS_PER_SHARED_GPU * len(ids))
    return tuple(itertools.islice(itertools.cycle(ids), max(ranks, len(ids))))


def site_of(
    plan: Plan,
    store: Store,
    options: RunOptions,
    observer: Observer,
    objects: Path | None = None,
) -> Site:
    """The scheduler to which a plan's jobs are submitted.

    ``observer`` gets an event when the scheduler is slow to answer. ``objects`` is the folder into
    which objects of Kubernetes are written.

    Raises ClusterError when the scheduler's commands are missing: now, not after minutes of
    preparation.
    """
    cluster = plan.experiment.cluster
    if cluster is None:
        raise ValueError("the launcher of the plan needs no cluster")
    if cluster.kubernetes is None and shutil.which("sbatch") is None:
        raise ClusterError(
            "sbatch is not on the PATH: run converge on a login node of the cluster (perhaps after "
            "`module load slurm`), or on this machine with --launcher local"
        )

    def say(what: str) -> None:
        observer(Preparing(time.time(), what))

    backend = backend_of(cluster, store, objects=objects, say=say)
    return Site(store, backend, cluster, plan.experiment, options)


def baseline_record(job: Job) -> RunRecord:
    """The record of a baseline's run, under the job's current name."""
    if job.baseline is None:
        raise ValueError(f"{job.name} is not a baseline")
    return replace(read_record(job.baseline), name=job.name, reused=True)
