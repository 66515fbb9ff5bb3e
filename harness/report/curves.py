"""Curves for drawing: differences and ratios to a control. Judging has its own, stricter code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.judge.curves import relative_difference, series
from harness.model import Evidence, Floats

LOSS_ONLY_LIMIT = 0.01
"""Largest relative loss difference of the loss-only gate that reports show for comparison.

Gates in use compare the loss alone and allow between 1% and 5%; this is the strictest of them.
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over steps, of equal length; NaN where a run left nothing or left NaN."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return any(math.isfinite(value) for value in self.values)


@dataclass(frozen=True, slots=True)
class LossOnlyGate:
    """What a gate that looks at the loss alone would have said: there to be compared with."""

    measured: float
    """Largest relative loss difference over the common steps; infinite when one is not finite."""
    limit: float = LOSS_ONLY_LIMIT

    @property
    def passes(self) -> bool:
        return self.measured <= self.limit


def signal_curve(evidence: Evidence, signal: str) -> Curve:
    """A signal as the run left it; empty when the run does not have it at all.

    A column shorter or longer than the steps (an integrity finding) is padded or cut.
    """
    found = series(evidence, signal)
    if not found.steps.size:
        return Curve()
    steps = np.unique(evidence.steps)
    values = np.full(steps.size, math.nan)
    values[np.searchsorted(steps, found.steps)] = found.values
    return Curve(tuple(steps.tolist()), tuple(values.tolist()))


def difference(test: Curve, control: Curve) -> Curve:
    """Relative difference at the common steps, as judging defines it: infinite when not finite."""
    steps, ours, theirs = _common(test, control)
    return Curve(steps, tuple(relative_difference(ours, theirs).tolist()))


def ratio(test: Curve, control: Curve) -> Curve:
    """``test / control`` at the common steps; not finite where the control is zero."""
    steps, ours, theirs = _common(test, control)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return Curve(steps, tuple((ours / theirs).tolist()))


def loss_only_gate(loss_difference: Curve) -> LossOnlyGate | None:
    """The comparison gate's word; None without a common step."""
    if not loss_difference.values:
        return None
    return LossOnlyGate(max(loss_difference.values))


def _common(test: Curve, control: Curve) -> tuple[tuple[int, ...], Floats, Floats]:
    theirs = dict(zip(control.steps, control.values, strict=True))
    ours = dict(zip(test.steps, test.values, strict=True))
    steps = tuple(step for step in ours if step in theirs)
    return (
        steps,
        np.array([ours[step] for step in steps], dtype=np.float64),
        np.array([theirs[step] for step in steps], dtype=np.float64),
    )
