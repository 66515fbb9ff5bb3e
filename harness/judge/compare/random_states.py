"""Which random numbers two runs draw step by step, by digests of the generators' states.

Equal digests mean equal numbers, so a step that begins as an earlier one did repeats its dropout
masks. A single step says nothing: a process that starts again sets up its loader, which draws a
seed that no model sees, from the state that the process had at its first start. So a step counts
only if the next step, too, draws what came next the first time. After a resize steps draw more
often or less often, so there any later step (before the numbers start over once more) may draw
anything that came later.

All functions but ``generators`` look at the states of one kind of generators, which are those in
``Evidence.random_states`` of the two runs of its ``Generators``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.curves import difference_beyond_print, pair
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.floors import FLOORS, coarser
from converge_harness.judge.degrees import in_force_over, parallelism_of
from converge_harness.model import (
    JUDGED_SIGNALS,
    Evidence,
    Floats,
    Integers,
    Parallelism,
    Precision,
)

_JUMP = 3.0
"""How many times as far off as before a step has to be: rounding grows from step to step."""


class DrawnAgain(NamedTuple):
    """A step that draws the random numbers of an earlier one."""

    step: int
    of: int


class Generators(NamedTuple):
    """Two runs with the states of one kind of generators."""

    whose: str
    """``torch``, ``Python's random`` or ``numpy.random``."""
    test: Evidence
    control: Evidence
    envelopes: tuple[Envelope, ...] = ()
    """How far signals may be from the control's, by its repeats, where that is known."""


_TORCH = "torch"
_GLOBAL = {"python": "Python's random", "numpy": "numpy.random"}


def generators(
    test: Evidence, control: Evidence, envelopes: tuple[Envelope, ...] = ()
) -> Iterator[Generators]:
    """Every kind of generators: torch's, then the global ones of Python and NumPy.

    Of the global ones only the states are judged, and not which ranks share them: that ranks
    shuffle or augment alike is what many programs want.
    """
    yield Generators(_TORCH, test, control, envelopes)
    for library, whose in _GLOBAL.items():
        one, other = (
            replace(run, random_states=run.global_random_states.get(library, ()), random_shared=())
            for run in (test, control)
        )
        yield Generators(whose, one, other, envelopes)


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


def repeats(test: Evidence, control: Evidence) -> Iterator[DrawnAgain]:
    """The steps from which on a run draws numbers again that it has drawn before, in order.

    Not those that the control repeats, too, as if it were seeded anew on purpose, nor those at
    which it draws nothing.
    """
    ours, all_of_ours = drawing(test), _drawn(test)
    theirs, all_of_theirs = drawing(control), _drawn(control)
    places: dict[str, list[int]] = {}
    for step, state in all_of_ours.items():
        places.setdefault(state, []).append(step)
    first: dict[str, int] = {}
    for step, state in sorted(ours.items()):
        of = first.setdefault(state, step)
        if of == step:
            continue
        # A run that starts over right after that step shows only in its control what came next.
        came_next = {all_of_ours.get(of + 1), all_of_theirs.get(of + 1)}
        if len(_degrees(test, np.array((of, step)))) > 1:
            # Resized: a step draws more often than it did, or less often.
            goes_on = any(
                each in came_next or _is_between(places[each], of, step)
                for each in _until_again(all_of_ours, step)
            )
        else:
            goes_on = all_of_ours[step + 1] in came_next
        if goes_on and step in theirs and theirs[step] != all_of_theirs.get(of):
            yield DrawnAgain(step, of)


def _until_again(states: Mapping[int, str], step: int) -> Iterator[str]:
    """The states of later steps, up to the next one that begins as this one: it starts over itself.

    ``states`` are by step, in order.
    """
    at = list(states)
    later = (states[each] for each in at[bisect_right(at, step) :])
    return takewhile(lambda each: each != states[step], later)


def _is_between(steps: Sequence[int], first: int, last: int) -> bool:
    """Whether one of some steps, which are in order, is between two others."""
    return bisect_right(steps, first) < bisect_left(steps, last)


def effect(kind: Generators, found: DrawnAgain) -> bool | None:
    """Whether loss or grad norm show that a model used the numbers that are drawn again.

    A DataLoader draws seeds, too, which change nothing. Two runs of the same degrees and precision
    compute alike, so float32's floor is their limit in any precision. Others round as the coarser
    one does, and as far as repeats of the control allow. Masks move both signals much further.
    What was off by more than a third of it before, while both drew the same numbers, has another
    reason; with the generators of Python and NumPy whatever both drew, because ranks that seed
    them with their own number never draw the same on other degrees, and the samples that they
    change are compared by their digests. None: neither run shows it.
    """
    test, control = kind.test, kind.control
    alike = _compute_alike(test, control, found.step)
    floors = FLOORS[Precision.FP32 if alike else coarser(test.precision, control.precision)]
    allowed = {} if alike else {each.signal: each for each in kind.envelopes}
    ours, theirs = _drawn(test), _drawn(control)
    known: list[bool] = []
    for signal in JUDGED_SIGNALS:
        curves = pair(test, control, signal)
        off = difference_beyond_print(test, control, signal, curves)
        here = np.isin(curves.steps, (found.step, found.step + 1))
        if not here.any():
            continue
        earlier = curves.steps < found.step
        if kind.whose == _TORCH:
            drew = [ours.get(step) == theirs.get(step) for step in curves.steps.tolist()]
            earlier &= np.array(drew, dtype=np.bool_)
        limit = np.maximum(floors[signal].at(curves.steps), _JUMP * off[earlier].max(initial=0.0))
        if signal in allowed:
            limit = np.maximum(limit, _finite_limit(allowed[signal], curves.steps))
        known.append(bool((off > limit)[here].any()))
    return any(known) if known else None


def _compute_alike(test: Evidence, control: Evidence, last: int) -> bool:
    """Whether both runs have had the same degrees and precision up to a step."""
    degrees = {
        each for run in (test, control) for each in _degrees(run, run.steps[run.steps <= last])
    }
    return len(degrees) == 1 and test.precision == control.precision


def _finite_limit(envelope: Envelope, steps: Integers) -> Floats:
    """Shape (steps,): an envelope's limits; 0 where it has none."""
    limits = dict(zip(envelope.steps.tolist(), envelope.limit.tolist(), strict=True))
    found = np.array([limits.get(step, 0.0) for step in steps.tolist()])
    return np.where(np.isfinite(found), found, 0.0)


def _degrees(run: Evidence, steps: Integers) -> set[Parallelism | None]:
    """All degrees under which a run has trained some steps."""
    return {parallelism_of(ran) for ran, _ in in_force_over(run, steps)}


def repeated(kind: Generators) -> DrawnAgain | None:
    """The first step that draws numbers again which its model uses."""
    again = repeats(kind.test, kind.control)
    return next((each for each in again if effect(kind, each)), None)


def parted(test: Evidence, control: Evidence) -> int | None:
    """The first step that draws other numbers than the control's, after one that drew the same.

    None if there is no such step. Steps before the first one that drew the same do not count.
    """
    ours, theirs = drawing(test), drawing(control)
    alike = False
    for step in sorted(ours.keys() & theirs.keys()):
        if ours[step] == theirs[step]:
            alike = True
        elif alike:
            return step
    return None


def parted_with_effect(kind: Generators) -> int | None:
    """The same, unless loss and grad norm show that a model does not use these numbers.

    Other masks of torch may move them by less than rounding does, if the runs compute differently.
    """
    step = parted(kind.test, kind.control)
    if step is None:
        return None
    shows = kind.whose != _TORCH or _compute_alike(kind.test, kind.control, step)
    return None if shows and effect(kind, DrawnAgain(step, step)) is False else step


def draws_nothing(run: Evidence, other: Evidence) -> tuple[int, ...]:
    """The steps that draw nothing where the other run draws, in that step and the next one."""
    states = zip(run.steps.tolist(), run.random_states, strict=False)
    silent = {step for step, state in states if state == ""}
    return tuple(step for step in sorted(drawing(other)) if step in silent)


def met_elsewhere(test: Evidence, control: Evidence, since: int) -> DrawnAgain | None:
    """The first step that begins as another one of the control, both from a step on.

    Then both go through the same numbers, of which one draws more in a step than the other.
    """
    theirs = {state: step for step, state in _drawn(control).items() if step >= since}
    for step, state in sorted(_drawn(test).items()):
        if step >= since and theirs.get(state, step) != step:
            return DrawnAgain(step, theirs[state])
    return None


def shared(run: Evidence) -> dict[int, bool]:
    """By step, whether ranks that train on other samples drew the same; where several drew."""
    kept = drawing(run)
    steps = zip(run.steps.tolist(), run.random_shared, strict=False)
    return {step: alike for step, alike in steps if step in kept and alike is not None}
