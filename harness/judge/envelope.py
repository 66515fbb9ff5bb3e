"""The growth envelope: how far a signal may be from the control's, step by step.

Learnt from the control's A/A repeats, never narrower than the floating-point floor, and replaced
by a tolerance that the experiment file sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.judge.curves import Floats, Steps, pair, relative_difference
from harness.judge.floors import FLOORS, JUDGED_SIGNALS, SPREAD_FACTOR, coarser
from harness.model import Evidence, Limit


@dataclass(frozen=True, slots=True)
class Envelope:
    """One signal of a test set against its control; every tuple has one entry per step."""

    signal: str
    steps: tuple[int, ...]
    test: tuple[float, ...]
    control: tuple[float, ...]
    difference: tuple[float, ...]
    """Relative difference to the control."""
    limit: tuple[float, ...]
    origins: tuple[str, ...]
    """Where each limit comes from, in words."""

    @property
    def outside(self) -> tuple[int, ...]:
        """Steps at which the difference is above the limit (written so that NaN is outside)."""
        return tuple(
            step
            for step, difference, limit in zip(self.steps, self.difference, self.limit, strict=True)
            if not difference <= limit
        )

    @property
    def worst(self) -> int:
        """Index of the step whose difference is largest for its limit."""
        return max(range(len(self.steps)), key=lambda i: _excess(self.difference[i], self.limit[i]))

    def limit_at(self, index: int) -> Limit:
        return Limit(self.limit[index], self.origins[index])


def learn(
    signal: str,
    test: Evidence,
    control: Evidence,
    repeats: Sequence[Evidence] = (),
    tolerances: Mapping[str, float] | None = None,
) -> Envelope | None:
    """Compare one signal of a test set with the control's.

    Returns None when the two have no step in common at which both left a value. Tolerances map
    signals to the largest relative difference allowed; a recomputed signal without one of its own
    takes that of the reported signal. Raises ValueError for a tolerance that is negative or not
    finite: it would pass everything or nothing.
    """
    curves = pair(test, control, signal)
    if not curves.steps.size:
        return None
    difference = relative_difference(curves.test, curves.control)
    tolerance = tolerance_for(signal, tolerances or {})
    if tolerance is not None:
        limit = np.full(curves.steps.size, tolerance)
        origins = ["set in the file"] * curves.steps.size
    else:
        limit, origins = _learnt(signal, test, control, repeats, curves.steps)
    return Envelope(
        signal=signal,
        steps=tuple(curves.steps.tolist()),
        test=tuple(curves.test.tolist()),
        control=tuple(curves.control.tolist()),
        difference=tuple(difference.tolist()),
        limit=tuple(limit.tolist()),
        origins=tuple(origins),
    )


def limits(
    test: Evidence,
    control: Evidence,
    repeats: Sequence[Evidence] = (),
    tolerances: Mapping[str, float] | None = None,
) -> Mapping[str, tuple[float, ...]]:
    """Signal to its limit at every step that both runs list, in the test's order, for drawing.

    NaN at a step where one of them left no value; signals that cannot be compared are left out.
    """
    learnt = (learn(signal, test, control, repeats, tolerances) for signal in JUDGED_SIGNALS)
    theirs = set(control.steps)
    common = [step for step in dict.fromkeys(test.steps) if step in theirs]
    tables = {
        envelope.signal: dict(zip(envelope.steps, envelope.limit, strict=True))
        for envelope in learnt
        if envelope is not None
    }
    return {
        signal: tuple(table.get(step, math.nan) for step in common)
        for signal, table in tables.items()
    }


def tolerance_for(signal: str, tolerances: Mapping[str, float]) -> float | None:
    """The file's tolerance for a signal, checked; see :func:`learn`."""
    value = tolerances.get(signal, tolerances.get(signal.removesuffix("_recomputed")))
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"tolerance of {signal} is {value}: it must be finite and at least 0")
    return value


def spread(signal: str, control: Evidence, repeats: Sequence[Evidence], steps: Steps) -> Floats:
    """Largest relative difference of any repeat to the control, up to and including each step.

    A running maximum: what rounding did once, it may do again. Zeros without repeats; repeats are
    expected to be sound (the integrity tier checks that), and their non-finite values are left
    out here so that a broken repeat cannot widen an envelope.
    """
    largest = np.zeros(steps.size)
    for repeat in repeats:
        curves = pair(repeat, control, signal)
        difference = relative_difference(curves.test, curves.control)
        by_step = dict(zip(curves.steps.tolist(), difference.tolist(), strict=True))
        seen = np.array([by_step.get(step, 0.0) for step in steps.tolist()])
        largest = np.maximum(largest, np.where(np.isfinite(seen), seen, 0.0))
    return np.maximum.accumulate(largest)


def _learnt(
    signal: str, test: Evidence, control: Evidence, repeats: Sequence[Evidence], steps: Steps
) -> tuple[Floats, list[str]]:
    """Limit and origin per step from floor, repeats and the rounding of the sources."""
    precision = coarser(test.precision, control.precision)
    floor = FLOORS[precision][signal].at(steps)
    learnt = SPREAD_FACTOR * spread(signal, control, repeats, steps)
    count = len(repeats)
    from_floor = f"floor of {precision.value} arithmetic"
    from_spread = f"{SPREAD_FACTOR:g} x the spread of {count} repeat{'s' * (count != 1)}"
    origins = [from_spread if wide else from_floor for wide in learnt > floor]
    limit = np.maximum(floor, learnt)
    rounding = test.rounding.get(signal, 0.0) + control.rounding.get(signal, 0.0)
    if rounding:
        curves = pair(test, control, signal)
        magnitude = np.minimum(np.abs(curves.test), np.abs(curves.control))
        printed = magnitude > rounding  # below that nothing of the value was printed
        limit = limit + rounding / np.where(printed, magnitude, np.inf)
        origins = [f"{origin}, and the rounding of the log" for origin in origins]
    return limit, origins


def _excess(difference: float, limit: float) -> float:
    """Difference in units of its limit."""
    if limit:
        return difference / limit
    return math.inf if difference else 0.0
