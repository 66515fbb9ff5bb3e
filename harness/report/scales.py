"""Axes that fit what is drawn: where zero goes on a log axis, when a ratio needs one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.report.curves import Curve

_RATIO_LINEAR_UP_TO = 1.5


def zero_line(curves: Iterable[Curve]) -> float:
    """A power of ten below every positive value: zero (bit-identical) is drawn there."""
    positive = [v for curve in curves for v in curve.values if math.isfinite(v) and v > 0]
    smallest = min(positive, default=1e-6)
    return float(10.0 ** (math.floor(math.log10(max(smallest, 1e-300))) - 1))


def raised(curve: Curve, zero: float) -> Curve:
    """The curve with its zeros on the zero line, because a log axis has none."""
    return Curve(curve.steps, tuple(zero if value == 0 else value for value in curve.values))


def decades(zero: float, curves: Iterable[Curve]) -> list[int]:
    """Exponents of the ticks from the zero line up past the largest value, at most about ten."""
    finite = [v for curve in curves for v in curve.values if math.isfinite(v) and v > 0]
    first = round(math.log10(zero))
    last = max(math.ceil(math.log10(max(finite, default=zero))), first + 1)
    stride = max(1, math.ceil((last - first) / 10))
    return list(range(first, last + stride, stride))


def ratio_needs_log(curves: Iterable[Curve]) -> bool:
    """Whether ratios reach so far from 1 that a linear axis would hide all but the worst."""
    finite = [v for curve in curves for v in curve.values if math.isfinite(v) and v > 0]
    return bool(finite) and max(*finite, 1 / min(finite)) > _RATIO_LINEAR_UP_TO
