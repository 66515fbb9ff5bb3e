"""Labelled lines in figures where the passes of a run meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from converge_harness.report.view.resumed_run import FaultView, PassesView, PassView

_NO_STEP = (0, 0)


class MarkKind(StrEnum):
    BORDER = "border"
    """Two segments meet, as planned."""
    FAULT = "fault"
    RESTART = "restart"
    """A pass went on from a checkpoint, because the one before it died."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a short label."""

    step: float
    """A half lies between two steps."""
    text: str
    kind: MarkKind
    row: int = 0
    """Labels of one row do not overlap; row 0 is nearest to the curves."""
    leftwards: bool = False
    """Whether the label is left of its line, because it does not fit to the right of it."""


def marks(view: PassesView, characters: int) -> tuple[Mark, ...]:
    """The lines of a run, in the order of their steps, each with a row for its label.

    Args:
        view: The run's passes and faults.
        characters: How many characters of a label the figure is wide.
    """
    found = Counter(
        (float(fault.step), fault.numbered(fault.text), MarkKind.FAULT)
        for fault in view.faults
        if fault.struck
    )
    loaded = [each for each in view.passes if each.loaded_step is not None]
    how = "continued" if view.interrupted else "restart"
    found.update(_resume(*pair, view.faults, how) for pair in pairwise(loaded))
    every = [
        Mark(step, text if times == 1 else f"{text} ({times}x)", kind)
        for (step, text, kind), times in sorted(found.items())
    ]
    last = max((each.steps or _NO_STEP)[1] for each in view.passes)
    return _placed(every, last, max(last, 1) / characters)


def _resume(
    before: PassView, after: PassView, faults: Sequence[FaultView], how: str
) -> tuple[float, str, MarkKind]:
    step = after.loaded_step or 0
    between = step + 0.5
    resharded = before.degrees != after.degrees
    degrees = f"{before.degrees} -> {after.degrees}" if resharded else ""
    if before.ended == "ended" and before.steps and before.steps[1] == step:
        return between, degrees or "resume", MarkKind.BORDER
    answered = [
        fault.position
        for fault in faults
        if fault.position and before.number <= (fault.at_pass or 0) < after.number
    ]
    source = f"step {step}" if step else "the initial weights"
    restart = f"after {answered[-1]}: from {source}" if answered else f"{how} from {step}"
    separator = ", " if answered else ": "
    return between, separator.join([restart, degrees] if degrees else [restart]), MarkKind.RESTART


def _placed(every: Sequence[Mark], last: int, steps_per_character: float) -> tuple[Mark, ...]:
    """Put each label into the lowest row that is free at its place.

    From right to left, because a label is right of its line: then the line of a label in a higher
    row is left of the labels below it.
    """
    taken: list[list[tuple[float, float]]] = []
    placed = []
    for mark in reversed(every):
        width = (len(mark.text) + 2) * steps_per_character
        leftwards = mark.step + width > last and mark.step > width
        start = mark.step - width if leftwards else mark.step
        free = (
            index
            for index, row in enumerate(taken)
            if all(start + width <= left or right <= start for left, right in row)
        )
        row = next(free, len(taken))
        if row == len(taken):
            taken.append([])
        taken[row].append((start, start + width))
        placed.append(replace(mark, row=row, leftwards=leftwards))
    return tuple(reversed(placed))
