"""How far a run is: new lines of its growing ``metrics.jsonl``, and when it will end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.model import Job
from harness.store import number


@dataclass(frozen=True, slots=True)
class StepLine:
    """What the launcher wants to know of a step; judging reads the whole line later."""

    step: int
    loss: float | None


@dataclass(slots=True)
class MetricsTail:
    """Follows ``metrics.jsonl.part`` until it is renamed; every line is read once."""

    files: tuple[Path, Path]
    """While the job runs, and when training is complete (the same file, renamed)."""
    _offset: int = 0

    def new_steps(self) -> tuple[StepLine, ...]:
        """Steps whose lines were completed since the last call."""
        for path in self.files:
            try:
                with path.open("rb") as stream:
                    stream.seek(self._offset)
                    content = stream.read()
            except FileNotFoundError:
                continue
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            return tuple(step for line in whole.splitlines() if (step := _step_of(line)))
        return ()


def _step_of(line: bytes) -> StepLine | None:
    """None for other lines and damaged ones: readers judge the file, progress only shows it."""
    try:
        value = json.loads(line)
        if value["kind"] != "step":
            return None
        return StepLine(step=int(value["step"]), loss=number(value.get("loss")))
    except (ValueError, KeyError, TypeError):
        return None


def remaining_s(step: int, steps: int, since_first_step_s: float, first_step: int) -> float | None:
    """Seconds until the last step at the pace since the first; None while there is no pace."""
    if step <= first_step:
        return None
    return (steps - step) * since_first_step_s / (step - first_step)


@dataclass(frozen=True, slots=True)
class Pace:
    """One job as the forecast of the matrix sees it; times in seconds."""

    ranks: int
    elapsed_s: float | None = None
    """None: not started."""
    remaining_s: float | None = None
    """None: not known yet."""


def matrix_eta_s(
    finished: Sequence[tuple[Job, float]], unfinished: Sequence[Pace], slots: int
) -> float | None:
    """Seconds until the last job ends, for jobs packed into ``slots``.

    A job without a pace is expected to take, per rank, what finished ones (``(job, wall_s)``) took
    on average. None until something is known.
    """
    known = [wall / job.world_size for job, wall in finished]
    known += [
        (pace.elapsed_s + pace.remaining_s) / pace.ranks
        for pace in unfinished
        if pace.elapsed_s is not None and pace.remaining_s is not None
    ]
    if not known:
        return None
    per_rank = sum(known) / len(known)
    remaining = [
        pace.remaining_s
        if pace.remaining_s is not None
        else max(per_rank * pace.ranks - (pace.elapsed_s or 0.0), 0.0)
        for pace in unfinished
    ]
    work = sum(
        seconds * min(pace.ranks, slots)
        for seconds, pace in zip(remaining, unfinished, strict=True)
    )
    return max([work / slots, *remaining], default=0.0)
