"""Curves of evidence as arrays, aligned by step; a value that is not finite never agrees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.model import Evidence

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


class Pair(NamedTuple):
    """One signal of two runs at the steps that both have."""

    steps: Steps
    test: Floats
    control: Floats


def series(evidence: Evidence, signal: str) -> dict[int, float]:
    """Step to value, without the steps at which the run left none (None); NaN is a value.

    A step that occurs twice keeps its last value: the integrity tier reports it as such.
    """
    # Not strict: a column of another length than the steps is an integrity finding, not a crash.
    columns = zip(evidence.steps, evidence.signals.get(signal, ()), strict=False)
    return {step: float(value) for step, value in columns if value is not None}


def has(evidence: Evidence, signal: str) -> bool:
    """Whether the run has at least one value of a signal (NaN is one)."""
    return bool(series(evidence, signal))


def pair(test: Evidence, control: Evidence, signal: str) -> Pair:
    """One signal of both runs at their common steps, in the order of the steps."""
    ours, theirs = series(test, signal), series(control, signal)
    steps = sorted(ours.keys() & theirs.keys())
    return Pair(
        np.array(steps, dtype=np.int64),
        np.array([ours[step] for step in steps], dtype=np.float64),
        np.array([theirs[step] for step in steps], dtype=np.float64),
    )


def relative_difference(first: Floats, second: Floats) -> Floats:
    """``|first - second|`` over the smaller magnitude: symmetric, 1.0 for a factor of 2 or 1/2.

    Infinite where exactly one value is zero, or where either is not finite (two NaN, too).
    """
    smaller = np.minimum(np.abs(first), np.abs(second))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        difference = np.abs(first - second) / smaller
    difference = np.where(first == second, 0.0, difference)
    return np.where(np.isfinite(first) & np.isfinite(second), difference, np.inf)
