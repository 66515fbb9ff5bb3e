"""Two numbers for a sentence, in as many digits as tell one from the other."""

from __future__ import annotations

_EXACT = 17
"""Significant digits that write every float64 as itself."""


def apart(one: float, other: float, digits: int = 6) -> tuple[str, str]:
    """Both with at least so many significant digits, and with one more than tells them apart.

    Equal numbers, and not-a-numbers, have ``digits``.
    """
    for more in range(digits, _EXACT + 1):
        if f"{one:.{more}g}" != f"{other:.{more}g}":
            shown = more if more == digits else min(more + 1, _EXACT)
            return f"{one:.{shown}g}", f"{other:.{shown}g}"
    return f"{one:.{digits}g}", f"{other:.{digits}g}"
