"""A plan in the queue of a real Slurm, and rounds of the real loop that polls it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from converge_harness.cli.progress import Display
from converge_harness.launch import RunOptions
from converge_harness.launch.events import Event, Overview
from converge_harness.launch.scheduler.follow import follow_plan
from converge_harness.launch.scheduler.job_status import Site
from converge_harness.launch.slurm.commands import Slurm
from converge_harness.matrix.load import load_with_cluster, plan_experiment
from converge_harness.model import Cluster, Plan
from converge_harness.store import Store
from converge_harness.trainers import assume_toolchain
from scaling.experiments import KINDS, ROOT, write_experiment

sys.path.append(str(ROOT / "tests"))
from slurm_daemons import INSTALL, missing_programs, slurm_daemons

DEVICE = "cpu"


class Enough(Exception):  # noqa: N818 - a measurement has ended
    """Raised by the callback of the rounds; the loop then cancels its jobs."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A plan and the cluster for its jobs."""

    plan: Plan
    site: Site


@contextmanager
def queue(scratch: Path, jobs: int, cluster: Cluster) -> Iterator[Queue]:
    """Jobs for a temporary Slurm with two nodes of 64 CPUs.

    Raises SystemExit if Slurm is not installed.
    """
    if missing := missing_programs():
        raise SystemExit(f"there is no {', '.join(missing)}: {INSTALL}")
    # In addition: the control, its repeat, and the common seed checkpoint.
    file = write_experiment(scratch, jobs - 3, KINDS[:1])
    experiment = replace(load_with_cluster(file), cluster=cluster)
    plan = plan_experiment(experiment, on_gpu=False, find=assume_toolchain)
    corpora = {job.spec.train_config.data for job in plan.jobs}
    options = RunOptions(
        data={data: scratch / "data" for data in corpora if data is not None},
        cluster_device=DEVICE,
        check=False,
    )
    with slurm_daemons(cpus=64) as daemons:
        backend = Slurm(daemons.environment)
        yield Queue(plan, Site(Store(scratch / "store"), backend, cluster, experiment, options))


def follow(queued: Queue, at_round: Callable[[int, Overview], None]) -> None:
    """Follow a plan as ``converge run`` does, display included, until Enough is raised.

    ``at_round`` is called at the end of every round, with its number, starting at 1.
    """
    rounds = 0
    with Path("/dev/null").open("w") as nowhere, Display(Console(file=nowhere)) as display:

        def observe(event: Event) -> None:
            nonlocal rounds
            display(event)
            if isinstance(event, Overview):
                rounds += 1
                at_round(rounds, event)

        try:
            follow_plan(queued.plan, queued.site, observe)
        except Enough:
            return
    raise SystemExit(
        f"the jobs were over after {rounds} rounds at {time.ctime()}: nothing measured"
    )
