"""Bringing the jobs of a plan to their records, with what a person sees meanwhile."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from harness import corpus
from harness.cli import matrix
from harness.cli.display import Display
from harness.cli.goldens import golden_record
from harness.errors import ClusterError
from harness.launch import RunOptions, run_plan
from harness.launch.events import Event, Observer, Preparing, Queued, Started
from harness.launch.slurm.commands import Slurm
from harness.launch.slurm.follow import follow_plan
from harness.launch.slurm.job_status import Site
from harness.model import Launcher, Plan, RunRecord, SyntheticData
from harness.store import Store
from harness.surroundings import gpu_models


@dataclass(frozen=True, slots=True)
class Ran:
    """What running a plan came to."""

    records: tuple[RunRecord, ...]
    """In the plan's order."""
    data: Mapping[SyntheticData, corpus.PreparedData]


def gpu_ids() -> tuple[int, ...]:
    """GPUs that ranks may use; empty: they run on the CPU."""
    return tuple(range(len(gpu_models())))


def run_jobs(plan: Plan, store: Store, arguments: argparse.Namespace, console: Console) -> Ran:
    """Bring every job of the plan to a record, here or on a cluster; finished ones are reused.

    ``arguments`` are those of a command that runs: ``fresh`` and ``cold``. Once a job is launched
    they say so (``noticing_launches``).
    """
    with Display(console) as display:
        display(
            Preparing(time.time(), f"{plan.experiment.name}: {len(plan.without_golden.jobs)} jobs")
        )
        data = matrix.prepare_data(plan, store)
        options = options_of(plan, data, fresh=arguments.fresh, warm=not arguments.cold)
        to_run = plan.without_golden
        if plan.experiment.launcher is Launcher.SLURM:
            observer = noticing_launches(display, arguments)
            records = follow_plan(to_run, site_of(plan, store, options, display), observer)
        else:
            records = run_plan(to_run, store, options, noticing_launches(display, arguments))
        made = dict(zip((job.name for job in to_run.jobs), records, strict=True))
        return Ran(tuple(made.get(job.name) or golden_record(job) for job in plan.jobs), data)


def noticing_launches(observer: Observer, arguments: argparse.Namespace) -> Observer:
    """An observer that sets ``arguments.launched`` once something was: an error is another then."""

    def notice(event: Event) -> None:
        if isinstance(event, Started) or (isinstance(event, Queued) and event.job_id):
            arguments.launched = True
        observer(event)

    return notice


def options_of(
    plan: Plan,
    data: Mapping[SyntheticData, corpus.PreparedData],
    *,
    fresh: bool = False,
    warm: bool = True,
) -> RunOptions:
    """How a plan is to be run, where its launcher runs it."""
    cluster = plan.experiment.cluster
    return RunOptions(
        data={values: prepared.folder for values, prepared in data.items()},
        gpus=gpu_ids() if cluster is None else (),
        cluster_device=cluster.device if cluster else None,
        fresh=fresh,
        warm=warm,
    )


def site_of(plan: Plan, store: Store, options: RunOptions, display: Display) -> Site:
    """Where the jobs of a plan for a scheduler are submitted.

    ``display`` is told when the scheduler lets us wait.

    Raises ClusterError when the scheduler's commands are not there: now, not after minutes of
    preparations.
    """
    cluster = plan.experiment.cluster
    if cluster is None:
        raise ValueError("the launcher of the plan needs no cluster")
    if shutil.which("sbatch") is None:
        raise ClusterError(
            "sbatch is not on the PATH: run converge on a login node of the cluster (perhaps after "
            "`module load slurm`), or on this machine with --launcher local"
        )

    def say(what: str) -> None:
        display(Preparing(time.time(), what))

    return Site(store, Slurm(say=say), cluster, plan.experiment, options)
