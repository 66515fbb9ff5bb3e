"""Curves of evidence as arrays, aligned by step; a value that is not finite never agrees.

Also the grid of steps at which a curve was logged: every one, every n-th, or doubling. Loggers
write the first and the last step beside every n-th (1, 10, 20, …, 95), so the first and the last
distance may be shorter. A longer one than n is a gap, wherever it is: what happened there was not
logged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from converge_harness.model import JUDGED_SIGNALS, Evidence, Flags, Floats, Integers


class SignalSeries(NamedTuple):
    """One signal of one run, at the steps at which the run left a value (NaN is one)."""

    steps: Integers
    values: Floats

    def at(self, step: int) -> float | None:
        """The value at a step; None when there is none."""
        index = int(np.searchsorted(self.steps, step))
        there = index < self.steps.size and int(self.steps[index]) == step
        return float(self.values[index]) if there else None


class CurvePair(NamedTuple):
    """One signal of two runs at the steps that both have."""

    steps: Integers
    test: Floats
    control: Floats


class Common(NamedTuple):
    """Steps that two runs share, and where they are in each."""

    steps: Integers
    first: Integers | slice
    """Index into arrays of the first run; a slice where all steps are shared: it copies nothing."""
    second: Integers | slice


def common_steps(first: Integers, second: Integers) -> Common:
    """Steps that are in both, in order, each once (of a step that occurs twice, the first)."""
    if np.array_equal(first, second) and _increasing(first):
        return Common(first, slice(None), slice(None))
    unique = _increasing(first) and _increasing(second)
    return Common(*np.intersect1d(first, second, assume_unique=unique, return_indices=True))


def _increasing(steps: Integers) -> bool:
    return bool(np.all(steps[1:] > steps[:-1]))


def series(evidence: Evidence, signal: str) -> SignalSeries:
    """A signal without its gaps; empty when the run lacks it."""
    column = evidence.signals.get(signal)
    if column is None:
        return SignalSeries(np.empty(0, dtype=np.int64), np.empty(0))
    # A column of another length than the steps is an integrity finding, not a crash.
    length = min(len(column), evidence.steps.size)
    present = column.present[:length]
    there = slice(None) if present.all() else present  # a million steps need not be copied
    return SignalSeries(evidence.steps[:length][there], column.values[:length][there])


def has(evidence: Evidence, signal: str) -> bool:
    """Whether the run has at least one value of a signal (NaN is one)."""
    column = evidence.signals.get(signal)
    return column is not None and bool(column.present.any())


def whole_series(evidence: Evidence, signal: str) -> SignalSeries:
    """A signal at every step of a run, NaN where it has no value; empty when the run lacks it.

    A column shorter or longer than the steps (an integrity finding) is padded or cut.
    """
    found = series(evidence, signal)
    if not found.steps.size:
        return SignalSeries(np.empty(0, dtype=np.int64), np.empty(0))
    if np.array_equal(found.steps, evidence.steps) and _increasing(found.steps):
        return found
    steps = np.unique(evidence.steps)
    values = np.full(steps.size, np.nan)
    values[np.searchsorted(steps, found.steps)] = found.values
    return SignalSeries(steps, values)


class CurveDifference(NamedTuple):
    """How much one signal of two runs differs, at the steps that both have."""

    steps: Integers
    """Shape (steps,), increasing, as :func:`whole_series` has them."""
    difference: Floats
    """Shape (steps,): relative, with the sign of ``test - control``; infinite where one is not
    finite. An envelope has only the magnitude, and leaves out steps without a value."""
    ratio: Floats
    """Shape (steps,): test over control; not finite where the control is zero."""

    @property
    def largest(self) -> float | None:
        """The largest magnitude of the difference; None without a common step."""
        return float(np.abs(self.difference).max()) if self.steps.size else None


def curve_difference(test: SignalSeries, control: SignalSeries) -> CurveDifference:
    """Compare two curves at their common steps, for drawing; both have increasing steps."""
    steps, mine, other = common_steps(test.steps, control.steps)
    ours, theirs = test.values[mine], control.values[other]
    size = relative_difference(ours, theirs)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return CurveDifference(steps, np.where(np.less(ours, theirs), -size, size), ours / theirs)


def curve_differences(test: Evidence, control: Evidence) -> dict[str, CurveDifference]:
    """Every judged signal of two runs, for drawing; of no steps where one of them lacks it."""
    return {
        signal: curve_difference(whole_series(test, signal), whole_series(control, signal))
        for signal in JUDGED_SIGNALS
    }


def pair(test: Evidence, control: Evidence, signal: str) -> CurvePair:
    """One signal of both runs at their common steps, in the order of the steps.

    The steps of both are expected to increase; the integrity tier checks that.
    """
    ours, theirs = series(test, signal), series(control, signal)
    steps, mine, other = common_steps(ours.steps, theirs.steps)
    return CurvePair(steps, ours.values[mine], theirs.values[other])


def rounding_of(evidence: Evidence, signal: str, values: Floats) -> Floats:
    """How far each printed value may be from the original; 0 where nothing is rounded.

    ``values`` has shape (steps,), and so has the result: half a unit of the last place, or of the
    last significant digit where that is coarser.
    """
    places = evidence.rounding.get(signal, 0.0)
    digits = evidence.significant.get(signal)
    half = np.full(values.shape, places)
    if digits is None:
        return half
    sizes = np.abs(values)
    known = np.isfinite(sizes) & (sizes > 0)
    leading = np.floor(np.log10(sizes, where=known, out=np.zeros(values.shape)))
    return np.where(known, np.maximum(half, 0.5 * 10.0 ** (leading - digits + 1)), half)


def rounding_share(test: Evidence, control: Evidence, signal: str, curves: CurvePair) -> Floats:
    """The rounding of both sources, relative as differences are.

    Shape (steps,). Infinite where a value is smaller than the rounding: it was printed as zero.
    """
    rounding = rounding_of(test, signal, curves.test) + rounding_of(control, signal, curves.control)
    magnitude = np.minimum(np.abs(curves.test), np.abs(curves.control))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        share = np.where(magnitude > rounding, rounding / magnitude, np.inf)
    return np.where(rounding > 0, share, 0.0)


def unprinted(test: Evidence, control: Evidence, signal: str, curves: CurvePair) -> Flags:
    """Where a value was printed as 0.0000, and the two may be equal; shape (steps,)."""
    share = rounding_share(test, control, signal, curves)
    rounding = rounding_of(test, signal, curves.test) + rounding_of(control, signal, curves.control)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.isinf(share) & (np.abs(curves.test - curves.control) <= rounding)


def difference_beyond_print(
    test: Evidence, control: Evidence, signal: str, curves: CurvePair
) -> Floats:
    """The relative difference minus the rounding of both sources; shape (steps,)."""
    share = rounding_share(test, control, signal, curves)
    beyond = relative_difference(curves.test, curves.control) - np.where(np.isinf(share), 0, share)
    not_printed = unprinted(test, control, signal, curves)
    return np.where(not_printed, 0.0, np.maximum(beyond, 0.0))


def second_half(curves: CurvePair) -> CurvePair:
    """The part that a mean over a run is taken of: past the warm-up, where all runs are alike."""
    half = slice(curves.steps.size // 2, None)
    return CurvePair(curves.steps[half], curves.test[half], curves.control[half])


def signed_difference(curves: CurvePair) -> Floats:
    """Test minus control over the smaller magnitude; not finite where it is not comparable."""
    smaller = np.minimum(np.abs(curves.test), np.abs(curves.control))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        difference = (curves.test - curves.control) / smaller
    both_zero = (curves.test == 0) & (curves.control == 0)
    return np.where(both_zero, 0.0, difference)


def relative_difference(first: Floats, second: Floats) -> Floats:
    """``|first - second|`` over the smaller magnitude: symmetric, 1.0 for a factor of 2 or 1/2.

    Infinite where exactly one value is zero, or where either is not finite (two NaN, too).
    """
    smaller = np.minimum(np.abs(first), np.abs(second))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        difference = np.abs(first - second) / smaller
    difference = np.where(first == second, 0.0, difference)
    return np.where(np.isfinite(first) & np.isfinite(second), difference, np.inf)


class Hole(NamedTuple):
    """Steps that a curve should have by its own grid, but lacks."""

    first: int
    last: int
    spacing: int
    """Steps from one point to the next elsewhere."""

    @property
    def text(self) -> str:
        """``lacks steps 21 to 40, where it has every step``."""
        which = f"step {self.first}" if self.first == self.last else f"steps {self}"
        grid = "every step" if self.spacing == 1 else f"one step in {self.spacing}"
        return f"lacks {which}, where it has {grid} elsewhere"

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def spacing(steps: Integers) -> int:
    """The least distance of neighbouring points, the first and last pair aside; at least 1.

    ``steps`` has shape (points,) and increases.
    """
    gaps = np.diff(steps)
    inner = gaps[1:-1] if gaps.size > 2 else gaps[1:] if gaps.size > 1 else gaps  # noqa: PLR2004
    return int(inner.min(initial=2**62)) if inner.size else 1


def first_hole(steps: Integers) -> Hole | None:
    """The first distance that is longer than the grid's; None for a regular grid.

    ``steps`` has shape (points,) and increases.
    """
    if _doubles(steps):
        return None
    every = spacing(steps)
    long = np.flatnonzero(np.diff(steps) > every)
    if not long.size or steps.size <= 2:  # noqa: PLR2004 (one distance is regular)
        return None
    before, after = int(steps[long[0]]), int(steps[long[0] + 1])
    missing = range(before + every, after, every)
    return Hole(missing[0], missing[-1], every)


def _doubles(steps: Integers) -> bool:
    """Powers of two, or another doubling grid."""
    return bool(steps.size and steps[0] > 0 and np.all(steps[1:] == 2 * steps[:-1]))
