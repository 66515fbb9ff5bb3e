"""Axes that fit what is drawn: where zero goes on a log axis, when a ratio needs one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from harness.model import Floats
from harness.report.curves import Curve

_RATIO_LINEAR_UP_TO = 1.5
_NEARLY_EQUAL = 1e-4
"""Differences of a ratio to 1 that six digits at the ticks do not tell apart."""
_LEAST_RATIO_RANGE = 1e-6


def zero_line(curves: Iterable[Curve]) -> float:
    """A power of ten below every positive value: zero (bit-identical) is drawn there."""
    smallest = min((positive.min() for positive in _positive(curves)), default=1e-6)
    return float(10.0 ** (math.floor(math.log10(max(smallest, 1e-300))) - 1))


def raised(curve: Curve, zero: float) -> Curve:
    """The curve with its zeros on the zero line, because a log axis has none."""
    return Curve(curve.steps, np.where(curve.values == 0, zero, curve.values))


def decades(zero: float, curves: Iterable[Curve]) -> list[int]:
    """Exponents of the ticks from the zero line up past the largest value, at most about ten."""
    greatest = max((positive.max() for positive in _positive(curves)), default=zero)
    first = round(math.log10(zero))
    last = max(math.ceil(math.log10(greatest)), first + 1)
    stride = max(1, math.ceil((last - first) / 10))
    return list(range(first, last + stride, stride))


def ratio_needs_log(curves: Iterable[Curve]) -> bool:
    """Whether ratios reach so far from 1 that a linear axis would hide all but the worst."""
    return any(
        max(positive.max(), 1 / positive.min()) > _RATIO_LINEAR_UP_TO
        for positive in _positive(curves)
    )


def ratio_range(curves: Iterable[Curve]) -> tuple[float, float] | None:
    """A range around 1 for ratios so near to it that rounding alone would fill an axis; else None.

    It reaches at least 1e-6 to either side, so that noise below the signal's precision looks small.
    """
    finite = (curve.values[np.isfinite(curve.values)] for curve in curves)
    furthest = max((float(np.abs(values - 1).max()) for values in finite if values.size), default=1)
    if furthest > _NEARLY_EQUAL:
        return None
    half = max(1.1 * furthest, _LEAST_RATIO_RANGE)
    return 1 - half, 1 + half


def _positive(curves: Iterable[Curve]) -> list[Floats]:
    """The finite values above zero of every curve that has some."""
    every = (curve.values[np.isfinite(curve.values) & (curve.values > 0)] for curve in curves)
    return [positive for positive in every if positive.size]
