"""Numbers in sentences: counts with their noun, two numbers with enough digits; and controls."""

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
    return f"{amount} {plural(amount, noun)}"


def plural(amount: int, noun: str) -> str:
    """The noun as it stands after a number: ``step`` if that is 1, else ``steps``, ``passes``."""
    if amount == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def control_called(name: str) -> str:
    """A control in a sentence: ``control fsdp2``, and ``control`` where that is its name."""
    return "control" if name == "control" else f"control {name}"
