"""Builds every job of a plan without its GPUs: whether it works, its memory, its cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from converge_harness.errors import ConfigError, Problem
from converge_harness.launch import RunOptions
from converge_harness.launch import dry_run as processes
from converge_harness.launch.dry_run import DryRunResult, problems_of
from converge_harness.launch.interruption import interruptible
from converge_harness.matrix.cost import gpu_hours
from converge_harness.model import Job, Plan
from converge_harness.trainers import kinds, trainer_of_kind


@dataclass(frozen=True, slots=True)
class DryRunRow:
    """The result for one set, or one segment of an elastic set."""

    name: str
    job: Job
    largest: DryRunResult
    """The memory of the pipeline rank with the highest peak."""
    seconds: float
    """Total time of the dry runs of all its stages."""
    rss_bytes: int
    """The highest resident memory of its dry-run processes."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The results for a plan's jobs."""

    plan: Plan
    device: str
    answers: Sequence[DryRunResult]
    throughput: float | None = None
    """Tokens per second and GPU, from which costs are computed; None: no costs."""
    gpu_memory: float | None = None
    """Memory of a GPU, in GB."""
    wall_s: float = 0.0

    @property
    def rows(self) -> tuple[DryRunRow, ...]:
        """The results of the built sets, in the plan's order."""
        by_set: dict[tuple[str, int | None], list[DryRunResult]] = {}
        for answer in self.answers:
            if "peak_bytes" in answer.found:
                by_set.setdefault((answer.part.job.name, answer.part.segment), []).append(answer)
        return tuple(
            DryRunRow(
                name if segment is None else f"{name}, segment {segment}",
                each[0].part.job,
                max(each, key=lambda answer: answer.peak_bytes),
                sum(answer.found["seconds"] for answer in each),
                max(answer.found["peak_rss_bytes"] for answer in each),
            )
            for (name, segment), each in by_set.items()
        )

    @property
    def problems(self) -> list[Problem]:
        """The problems of the sets, each with its key."""
        return problems_of(self.answers)

    @property
    def document(self) -> dict[str, Any]:
        """All results as JSON values (schema 1)."""
        largest = [row.largest for row in self.rows]
        return {
            "schema": 1,
            "experiment": str(self.plan.experiment.path),
            "device": self.device,
            "gpu_memory_gb": self.gpu_memory,
            "tokens_per_gpu_second": self.throughput,
            "gpu_hours": {
                "total": self._hours(self.plan.jobs),
                "jobs": {job.name: self._hours([job]) for job in self.plan.jobs},
            },
            "parts": [
                {
                    "set": answer.part.job.name,
                    "segment": answer.part.segment,
                    "pipeline_rank": answer.part.stage,
                    "largest": any(answer is each for each in largest),
                    "toolchain": answer.part.job.toolchain.name,
                    **answer.found,
                }
                for answer in self.answers
            ],
            "problems": [str(problem) for problem in self.problems],
            "wall_s": round(self.wall_s, 1),
        }

    def _hours(self, jobs: Iterable[Job]) -> float | None:
        if not self.throughput:
            return None
        return sum(gpu_hours(job, self.throughput) for job in jobs)


def dry_run(
    plan: Plan,
    *,
    device: str | None = None,
    throughput: float | None = None,
    gpu_memory: float | None = None,
    on_answer: Callable[[DryRunResult], None],
) -> DryRun:
    """Build every job of a plan on this machine, up to and through its first steps.

    ``device`` and ``throughput`` replace those of the experiment. ``on_answer`` is called with each
    process's result when it ends.

    Raises ConfigError for sets that another program trains: only that program can build them.
    """
    _require_buildable(plan)
    device = device or device_of(plan)
    begun = time.monotonic()
    with interruptible() as stop:
        answers = processes.dry_run(
            plan.jobs, device, RunOptions(), os.environ, stop, on_answer=on_answer
        )
    wall_s = time.monotonic() - begun
    throughput = throughput or plan.experiment.tokens_per_gpu_second
    return DryRun(plan, device, answers, throughput, gpu_memory, wall_s)


def device_of(plan: Plan) -> str:
    """The device for which the experiment is meant: that of ``[cluster]``, else by its data.

    ``cpu`` for our synthetic corpus, which is made for laptops, ``cuda`` for other datasets.
    """
    cluster = plan.experiment.cluster
    if cluster is not None:
        return cluster.device
    synthetic = any(job.spec.train_config.data is not None for job in plan.jobs)
    return "cpu" if synthetic else "cuda"


def _require_buildable(plan: Plan) -> None:
    other = next((job for job in plan.jobs if not job.spec.trainer.can.dry_run), None)
    if other is not None:
        able = [each for each in kinds() if trainer_of_kind(each).default_spec().can.dry_run]
        raise ConfigError(
            Problem(
                f"{plan.experiment.path}: trainer.kind",
                f"is {other.spec.trainer.kind!r}: a dry run can only build models of "
                f"{' and '.join(map(repr, able))}",
                "leave --dry-run out",
            )
        )
