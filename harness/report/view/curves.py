"""Curves for drawing: differences and ratios to a control, aligned as the judge does it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from converge_harness.judge import CurveDifference, SignalSeries, curve_difference, whole_series
from converge_harness.model import Evidence, Floats, Integers

LOSS_ONLY_LIMIT = 0.01
"""Largest relative loss difference of the loss-only gate that reports show for comparison.

Gates in use compare only the loss and allow between 1% and 5%; this is the strictest of them.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Values over steps, of equal length; NaN where a run left nothing or left NaN.

    Plain sequences passed to it become arrays. Equal to a curve of the same numbers.
    """

    steps: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Shape (steps,), increasing."""
    values: Floats = field(default_factory=lambda: np.empty(0))
    """Shape (steps,)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, dtype=np.int64))
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float64))

    def __bool__(self) -> bool:
        return bool(np.isfinite(self.values).any())

    def __len__(self) -> int:
        return int(self.steps.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Curve):
            return NotImplemented
        same_steps = np.array_equal(self.steps, other.steps)
        return same_steps and np.array_equal(self.values, other.values, equal_nan=True)

    def __hash__(self) -> int:
        # Of the steps only: equal values may have different bits (zeros and NaN have signs).
        return hash(self.steps.tobytes())


@dataclass(frozen=True, slots=True)
class LossOnlyGate:
    """What a gate on the loss alone would have said, for comparison."""

    measured: float
    """Largest relative loss difference over the common steps; infinite when one is not finite."""
    limit: float = LOSS_ONLY_LIMIT

    @property
    def passes(self) -> bool:
        return self.measured <= self.limit


def signal_curve(evidence: Evidence, signal: str) -> Curve:
    """A signal as the run left it; empty when the run does not have it at all."""
    return Curve(*whole_series(evidence, signal))


def difference(test: Curve, control: Curve) -> Curve:
    """Relative difference at the common steps, as judging defines it: infinite when not finite.

    With the sign of ``test - control``; judging uses only its magnitude. For curves that are not of
    a judged pair: repeats, and steps that a later pass trained again.
    """
    return difference_of(compared(test, control))


def ratio(test: Curve, control: Curve) -> Curve:
    """``test / control`` at the common steps; not finite where the control is zero."""
    return ratio_of(compared(test, control))


def compared(test: Curve, control: Curve) -> CurveDifference:
    """Two curves by the judge's own comparison."""
    return curve_difference(
        SignalSeries(test.steps, test.values), SignalSeries(control.steps, control.values)
    )


def difference_of(found: CurveDifference) -> Curve:
    return Curve(found.steps, found.difference)


def ratio_of(found: CurveDifference) -> Curve:
    return Curve(found.steps, found.ratio)


def largest(curve: Curve) -> float | None:
    """The largest magnitude; None for a curve of no steps."""
    return float(np.abs(curve.values).max()) if len(curve) else None


def loss_only_gate(loss_difference: Curve) -> LossOnlyGate | None:
    """The comparison gate's answer; None without a common step."""
    measured = largest(loss_difference)
    return None if measured is None else LossOnlyGate(measured)
