"""Which random numbers two runs draw step by step, by digests of the generators' states.

Equal digests mean equal numbers, so a step that begins as an earlier one did repeats its dropout
masks. A single step says nothing: where it sets up its loader, a process that starts again draws a
seed that no model sees, from the state that it had at its first start. So only steps count whose
next one draws, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from converge_harness.model import Evidence


class DrawnAgain(NamedTuple):
    """A step that draws the random numbers of an earlier one."""

    step: int
    of: int


def is_recorded(run: Evidence) -> bool:
    """Whether the run says of any step what it drew."""
    return any(state is not None for state in run.random_states)


def unrecorded(run: Evidence) -> int | None:
    """The first step of a run that records what it drew, of which it does not; None: of all."""
    states = zip(run.steps.tolist(), run.random_states, strict=False)
    return next((step for step, state in states if state is None), None)


def drawing(run: Evidence) -> dict[int, str]:
    """The states by step, of steps that draw and whose next one draws, too."""
    states = _drawn(run)
    return {step: state for step, state in states.items() if step + 1 in states}


def _drawn(run: Evidence) -> dict[int, str]:
    """The states by step, of steps that draw."""
    states = zip(run.steps.tolist(), run.random_states, strict=False)
    return {step: state for step, state in states if state}


def repeated(test: Evidence, control: Evidence | None = None) -> DrawnAgain | None:
    """The first step from which on a run draws numbers again that it has drawn before.

    None also where the control repeats the same step, as if it were seeded anew on purpose, or
    draws nothing there.
    """
    ours, all_of_ours = drawing(test), _drawn(test)
    theirs, all_of_theirs = ({}, {}) if control is None else (drawing(control), _drawn(control))
    first: dict[str, int] = {}
    for step, state in sorted(ours.items()):
        of = first.setdefault(state, step)
        # A run that starts over right after that step shows only in its control what came next.
        following = (all_of_ours.get(of + 1), all_of_theirs.get(of + 1))
        if of == step or all_of_ours[step + 1] not in following:
            continue
        if control is None or (step in theirs and theirs[step] != theirs.get(of)):
            return DrawnAgain(step, of)
    return None


def parted(test: Evidence, control: Evidence) -> int | None:
    """The first step that draws other numbers than the control's, after others that drew the same.

    None if there is no such step, or if no step before it drew in both.
    """
    ours, theirs = drawing(test), drawing(control)
    for step in np.intersect1d([*ours], [*theirs]).tolist():
        if ours[step] != theirs[step]:
            before = [each for each in ours.keys() & theirs.keys() if each < step]
            return int(step) if before else None
    return None


def shared(run: Evidence) -> dict[int, bool]:
    """By step, whether ranks that train on other samples drew the same; where several drew."""
    kept = drawing(run)
    steps = zip(run.steps.tolist(), run.random_shared, strict=False)
    return {step: alike for step, alike in steps if step in kept and alike is not None}
