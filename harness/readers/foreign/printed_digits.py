"""How coarsely a source prints a signal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from converge_harness.model import JUDGED_SIGNALS, Evidence

FULL_PRECISION = 9
"""Significant digits from which on nothing is rounded that a float32 holds."""
_FLOAT32 = 2.0**-24
"""Half a unit of a float32's last place, of its value."""
PRINTED = JUDGED_SIGNALS
"""Signals that are judged as far as they are printed. Counts are exact, and so are learning rates:
somebody chose them, and 0.001 is not 0.0014."""


class Digits(NamedTuple):
    """How far the values of one signal are printed: the most that any of them shows.

    A tool that prints a fixed number of places drops closing zeros, and one that prints significant
    digits shows more places of small values: a single value tells neither.
    """

    places: int
    """Behind the point; below 0 where an exponent leaves out places before it."""
    significant: int

    def most(self, other: Digits) -> Digits:
        return Digits(max(self.places, other.places), max(self.significant, other.significant))


NO_DIGITS = Digits(-400, 0)
"""Of no values at all; a float64 has at most 308 places before the point."""


def digits_of(values: Iterable[object]) -> Digits:
    """The digits of cells as they stand in a file, or of numbers that JSON was read to.

    Holes and values that are not finite show none.
    """
    texts = [
        value if isinstance(value, str) else repr(value) for value in values if value is not None
    ]
    found = _of_text(max(texts, key=len, default=""))
    if found.significant >= FULL_PRECISION:
        return found  # more of them tell nothing more
    # A million numbers have few shapes; an exponent has to stay what it is.
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
    """Evidence that says how far its signals are printed.

    A loss is no count: 7 may have been 7.4 as well.
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
    """Whether even the smallest value is printed as finely as a float32 holds it.

    A single large value shows many digits of fixed places, and the small ones few.
    """
    if digits.significant < FULL_PRECISION:
        return False
    sizes = np.abs(evidence.signals[signal].values) if signal in evidence.signals else np.array([])
    least = sizes[np.isfinite(sizes) & (sizes > 0)].min(initial=np.inf)
    return bool(half_unit(digits.places) <= _FLOAT32 * least)


def half_unit(places: int) -> float:
    """Half a unit of the last of some decimal places; below 0 of tens, hundreds …."""
    return 0.5 * 10.0**-places
