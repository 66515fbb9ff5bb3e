"""Axes that fit the data: signed differences, and ratios that need a log axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from converge_harness.model import Floats
from converge_harness.report.view.curves import Curve

_RATIO_LINEAR_UP_TO = 1.5
_NEARLY_EQUAL = 1e-4
"""Differences of a ratio to 1 that six digits at the ticks do not show."""
_LEAST_RATIO_RANGE = 1e-6
_MOST_DECADES = 18
"""To either side of zero: the least difference that an axis resolves."""


@dataclass(frozen=True, slots=True)
class SignedLog:
    """An axis for differences of either sign and any size: ``sign(y) log10(1 + |y| / unit)``.

    Zero (bit-identical) is in the middle, and from ten units on all decades have one length. The
    form is the symmetric log of Webber, "A bi-symmetric log transformation for wide-range data"
    (2013), with base 10.
    """

    unit: float
    greatest: float
    """Largest magnitude that is drawn."""

    @classmethod
    def over(cls, curves: Iterable[Curve]) -> SignedLog:
        """The axis on which the smallest nonzero difference is visibly not zero."""
        sizes = [np.abs(curve.values) for curve in curves]
        positive = [found for size in sizes if (found := size[np.isfinite(size) & (size > 0)]).size]
        greatest = max((float(size.max()) for size in positive), default=1e-6)
        smallest = min((float(size.min()) for size in positive), default=greatest)
        smallest = max(smallest, greatest * 10.0**-_MOST_DECADES)
        return cls(10.0 ** math.floor(math.log10(smallest)), greatest)

    def place(self, values: Floats) -> Floats:
        """Positions of values on the axis; the page's script computes the same."""
        return np.sign(values) * np.log10(1 + np.abs(values) / self.unit)

    @property
    def ticks(self) -> dict[float, str]:
        """Position to label, about five to either side of zero."""
        first = round(math.log10(self.unit))
        last = max(math.ceil(math.log10(self.greatest)), first + 1)
        stride = max(1, math.ceil((last - first) / 5))
        # From above: the outermost tick is the end of the axis.
        exponents = range(last, first, -stride)
        ticks = {0.0: "0"}
        for exponent in exponents:
            place = float(self.place(np.array(10.0**exponent)))
            ticks |= {place: f"1e{exponent}", -place: f"-1e{exponent}"}
        return dict(sorted(ticks.items()))

    @property
    def span(self) -> tuple[float, float]:
        """Both ends of the axis."""
        end = 1.04 * max(self.ticks)
        return -end, end


def ratio_needs_log(curves: Iterable[Curve]) -> bool:
    """Whether some ratio is so far from 1 that a linear axis would hide all but the worst."""
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
