"""How many digits of a signal a source prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from converge_harness.model import JUDGED_SIGNALS, Evidence

FULL_PRECISION = 9
"""With this many significant digits a float32 is printed without rounding."""
_FLOAT32 = 2.0**-24
"""Half a unit in the last place of a float32, relative to its value."""
PRINTED = JUDGED_SIGNALS
"""Signals for which rounding in print is allowed for. Counts are exact, and so are learning rates:
somebody chose them, and 0.001 is not 0.0014."""


class Digits(NamedTuple):
    """The printed digits of one signal: the maximum over its values.

    A tool that prints a fixed number of decimal places may drop trailing zeros, and one that prints
    significant digits shows more places of small values: a single value does not show which.
    """

    places: int
    """Decimal places; below 0 if an exponent leaves out digits before the point."""
    significant: int

    def most(self, other: Digits) -> Digits:
        return Digits(max(self.places, other.places), max(self.significant, other.significant))


NO_DIGITS = Digits(-400, 0)
"""For no values; a float64 has at most 308 digits before the point."""


def digits_of(values: Iterable[object]) -> Digits:
    """The digits of cells as written in a file, or of numbers parsed from JSON.

    Missing and non-finite values have none.
    """
    texts = [
        value if isinstance(value, str) else repr(value) for value in values if value is not None
    ]
    found = _of_text(max(texts, key=len, default=""))
    if found.significant >= FULL_PRECISION:
        return found  # that is enough
    # A million numbers have few patterns of digits; an exponent has to be kept.
    joined = "\n".join(texts).lower()
    shapes = joined if "e" in joined else joined.translate(_SHAPE)
    for shape in set(shapes.split("\n")):
        found = found.most(_of_text(shape))
    return found


_SHAPE = str.maketrans("23456789", "11111111")
"""Which digit it is matters only for leading zeros."""


def _of_text(text: str) -> Digits:
    """``-1.250e-02`` has 5 places and 4 significant digits."""
    mantissa, _, exponent = text.strip().lower().lstrip("+-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    if not (whole + fraction).isdigit():
        return NO_DIGITS
    places = len(fraction) - int(exponent or 0)
    return Digits(places, len((whole + fraction).lstrip("0")))


def printed_with(evidence: Evidence, digits: Mapping[str, Digits]) -> Evidence:
    """The evidence with the printed digits of its signals.

    A loss is not a count: 7 may have been 7.4.
    """
    coarse = {
        signal: each
        for signal, each in digits.items()
        if signal in PRINTED and each != NO_DIGITS and not _in_full(evidence, signal, each)
    }
    return replace(
        evidence,
        rounding={signal: half_unit(each.places) for signal, each in coarse.items()},
        significant={signal: each.significant for signal, each in coarse.items()},
    )


def _in_full(evidence: Evidence, signal: str, digits: Digits) -> bool:
    """Whether even the smallest value is printed with the full precision of a float32.

    With fixed decimal places a large value has many digits, but small ones have few.
    """
    if digits.significant < FULL_PRECISION:
        return False
    sizes = np.abs(evidence.signals[signal].values) if signal in evidence.signals else np.array([])
    least = sizes[np.isfinite(sizes) & (sizes > 0)].min(initial=np.inf)
    return bool(half_unit(digits.places) <= _FLOAT32 * least)


def half_unit(places: int) -> float:
    """Half a unit of the last decimal place; for negative ``places``, of tens, hundreds …."""
    return 0.5 * 10.0**-places
