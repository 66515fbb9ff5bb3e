"""What the segments of an elastic set mean."""

from __future__ import annotations

from collections.abc import Callable

from harness.errors import Problem
from harness.experiment.kinds import ElasticTable
from harness.experiment.tables import ParallelismTable
from harness.model import LOCAL_BATCH, Parallelism, Segment, SetSpec


def written_degrees(table: ParallelismTable) -> Parallelism:
    """The degrees in a table that may hold more."""
    return Parallelism(**{name: getattr(table, name) for name in ParallelismTable.model_fields})


def schedule_of(written: str | None, degrees: Parallelism) -> str | None:
    """The pipeline schedule: 1F1B where there is a pipeline and nothing else is asked for."""
    return written or ("1F1B" if degrees.pp > 1 else None)


def segments_of(
    table: ElasticTable, spec: SetSpec, where: Callable[[str], str], problems: list[Problem]
) -> tuple[Segment, ...]:
    """The segments in order; what keeps them from covering all steps is added to ``problems``.

    Args:
        table: the set as written.
        spec: the set without its segments: it says how many steps there are, and the local batch.
        where: from a key of the table to its place.
        problems: where problems are collected.
    """
    before = 0
    for index, segment in enumerate(table.segments):
        if segment.until <= before:
            problems.append(
                Problem(
                    where(f"segments[{index}].until"),
                    f"{segment.until} is not after the last step of the segment before, {before}: "
                    "segments would overlap or be empty",
                )
            )
        before = segment.until
    steps = spec.setting("training.steps")
    if isinstance(steps, int) and before != steps:
        problems.append(
            Problem(
                where(f"segments[{len(table.segments) - 1}].until"),
                f"the last segment ends with step {before}, and training.steps is {steps}",
                "the segments cover all steps, because steps shape the lr schedule",
            )
        )
    # What is no number is refused with the sizes of the set (harness/plan).
    local = spec.setting(LOCAL_BATCH)
    default = local if isinstance(local, int) else 1
    degrees = [written_degrees(segment) for segment in table.segments]
    return tuple(
        Segment(
            until=segment.until,
            parallelism=degree,
            local_batch_size=segment.local_batch_size or default,
            pipeline_schedule=schedule_of(segment.pipeline_schedule, degree),
        )
        for segment, degree in zip(table.segments, degrees, strict=True)
    )
