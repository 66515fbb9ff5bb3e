"""The cost of polling a thousand jobs in Slurm's queue."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from converge_harness.launch.events import Overview
from converge_harness.launch.scheduler.detached import submit_plan
from converge_harness.launch.scheduler.job_status import read_statuses
from converge_harness.model import Cluster
from scaling.clusters import DEVICE, Enough, follow, queue
from scaling.row import Row

JOBS = 1000
ROUNDS = 10
GOAL_S = 1.0


def polling(scratch: Path) -> Iterator[Row]:
    """Submit held jobs; measure polling alone, and whole rounds of the loop that follows them."""
    held = Cluster(
        ranks_per_node=4, device=DEVICE, gpus_per_node=False, sbatch=("--hold",), poll_s=0
    )
    with queue(scratch, JOBS, held) as queued:
        began = time.perf_counter()
        submitted = submit_plan(queued.plan, queued.site, lambda _event: None)
        yield Row(f"submitting {submitted.submitted:,} jobs", time.perf_counter() - began, "s")
        statuses = read_statuses(queued.site, queued.plan.jobs).values()
        ids = [each.submission.job_id for each in statuses if each.submission and each.in_queue]
        if len(ids) != JOBS:
            raise SystemExit(f"{len(ids)} of {JOBS} jobs are in the queue: nothing measured")
        times = []
        with processes_started() as started:
            for _ in range(ROUNDS):
                began = time.perf_counter()
                queued.site.backend.poll(ids)
                times.append(time.perf_counter() - began)
        yield Row(f"polling {JOBS:,} jobs, slowest of {ROUNDS}", max(times), "s", GOAL_S)
        yield Row("  processes that a poll starts", len(started) / ROUNDS, "queries", 1)

        ends: list[float] = []

        def at_round(number: int, overview: Overview) -> None:
            if overview.queued != JOBS:
                raise SystemExit(f"{overview.queued} of {JOBS} jobs are in the queue")
            ends.append(time.perf_counter())
            if number == 1:
                started.clear()  # before it, the loop looks at every run folder
            if number == 1 + ROUNDS:
                raise Enough

        with processes_started() as started:
            follow(queued, at_round)
        rounds = [end - begin for begin, end in pairwise(ends)]
        yield Row("a whole round of following them, slowest", max(rounds), "s", GOAL_S)
        yield Row("  median", median(rounds), "s")
        yield Row("  processes that a round starts", len(started) / ROUNDS, "queries", 1)


@contextmanager
def processes_started() -> Iterator[list[str]]:
    """The programs that this process starts in the meantime."""
    programs: list[str] = []
    counting = True

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if counting and event in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.fork"):
            programs.append(str(arguments[0]) if arguments else event)

    sys.addaudithook(hook)
    yield programs
    counting = False
