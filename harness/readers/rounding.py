"""How coarsely a source prints a signal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.model import Evidence

FULL_PRECISION = 9
"""Significant digits from which on nothing is rounded that a float32 holds."""
PRINTED = ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed")
"""Signals that are judged as far as they are printed. Counts are exact, and so are learning rates:
somebody chose them, and 0.001 is not 0.0014."""


class Digits(NamedTuple):
    """How far the values of one signal are printed: the most that any of them shows.

    A tool that prints a fixed number of places drops closing zeros, and one that prints significant
    digits shows more places of small values: a single value tells neither.
    """

    places: int
    """Behind the point."""
    significant: int

    def most(self, other: Digits) -> Digits:
        return Digits(max(self.places, other.places), max(self.significant, other.significant))


NO_DIGITS = Digits(0, 0)


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
    return Digits(max(places, 0), len((whole + fraction).lstrip("0")))


def printed_with(evidence: Evidence, digits: Mapping[str, Digits]) -> Evidence:
    """Evidence that says how far its signals are printed."""
    coarse = {
        signal: each
        for signal, each in digits.items()
        if signal in PRINTED and each.places and each.significant < FULL_PRECISION
    }
    return replace(
        evidence,
        rounding={signal: half_unit(each.places) for signal, each in coarse.items()},
        significant={signal: each.significant for signal, each in coarse.items()},
    )


def half_unit(places: int) -> float:
    """Half a unit of the last of some decimal places; 0 for none: whole numbers are exact."""
    return 0.5 * 10.0**-places if places else 0.0
