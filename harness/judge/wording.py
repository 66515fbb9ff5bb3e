"""Numbers in sentences: counts with their noun, and two numbers with enough digits to differ."""

from __future__ import annotations

_EXACT = 17
"""Significant digits that write every float64 as itself."""


def distinct_digits(one: float, other: float, digits: int = 6) -> tuple[str, str]:
    """Both with at least ``digits`` significant digits, and one more than makes them differ.

    Equal numbers, and NaN, have ``digits``.
    """
    for more in range(digits, _EXACT + 1):
        if f"{one:.{more}g}" != f"{other:.{more}g}":
            shown = more if more == digits else min(more + 1, _EXACT)
            return f"{one:.{shown}g}", f"{other:.{shown}g}"
    return f"{one:.{digits}g}", f"{other:.{digits}g}"


def counted(amount: int, noun: str) -> str:
    """``1 step``, ``3 steps``, ``2 passes``."""
    if amount == 1:
        return f"1 {noun}"
    return f"{amount} {noun}{'es' if noun.endswith('s') else 's'}"
