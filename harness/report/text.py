"""Values to short texts: one way of writing numbers, durations and names in every report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from converge_harness.model import CauseClass

_WHOLE_BELOW = 1e6
CAUSES_PAGE = "docs/causes.md"
ABSENT = "–"  # noqa: RUF001 - a dash, for people


def cause_page(kind: CauseClass) -> str:
    """Where converge's documentation says what a class of cause means, and how to look further."""
    return f"{CAUSES_PAGE}#{kind.value.replace(' ', '-')}"


def tail(text: str, lines: int) -> str:
    """The last lines of a text, saying what was left out."""
    every = text.split("\n")
    if len(every) <= lines:
        return text
    return "\n".join([f"… {len(every) - lines} earlier lines left out", *every[-lines:]])


def digits(value: float | None) -> str:
    """Three significant digits: ``0.00123``, ``1.2e-7``, ``nan``."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < _WHOLE_BELOW:
        return str(int(value))
    return re.sub(
        r"e([+-])0*(\d+)$", lambda match: f"e{match[1].strip('+')}{match[2]}", f"{value:.3g}"
    )


def excess(measured: float | None, limit: float | None) -> str:
    """How many times the limit was reached, as ``480x``; empty when that is not useful."""
    if measured is None or limit is None or not math.isfinite(measured) or limit <= 0:
        return ""
    times = measured / limit
    rounded = float(f"{times:.3g}")
    return f"{rounded:,.0f}x" if 100 <= rounded < 1e9 else f"{digits(times)}x"  # noqa: PLR2004


def percent(fraction: float) -> str:
    """A relative difference for people who compare it with 1%: ``5.65%``, ``<0.01%``."""
    if not math.isfinite(fraction):
        return "not finite"
    least = 1e-4
    return "<0.01%" if 0 < fraction < least else f"{digits(100 * fraction)}%"


def glued(sentence: str) -> str:
    """Numbers stay on the line of the word that they count."""
    return re.sub(r"(\d) (?=\w)", "\\1\N{NO-BREAK SPACE}", sentence)


def duration(seconds: float | None) -> str:
    """``8.2 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds is None:
        return ABSENT
    if seconds < 60:  # noqa: PLR2004 - seconds in a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004 - minutes in an hour
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def step_range(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return ABSENT
    first, last = steps
    return str(first) if first == last else f"{first}–{last}"  # noqa: RUF001 - a range, for people


def of_limit(measured: float | None, limit: float | None) -> str:
    """A measured value against its limit, for a cell: ``0.99, limit 2e-6 (495,000x)``."""
    if measured is None or limit is None:
        return ABSENT
    times = excess(measured, limit) if not measured <= limit else ""
    return f"{digits(measured)}, limit {digits(limit)}" + (f" ({times})" if times else "")


def anchors(names: Iterable[str]) -> list[str]:
    """One fragment identifier per name: readable, unique, stable as long as the names are."""
    taken: set[str] = set()
    result = []
    for name in names:
        stem = "set-" + (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed")
        anchor, again = stem, 2
        while anchor in taken:
            anchor, again = f"{stem}-{again}", again + 1
        taken.add(anchor)
        result.append(anchor)
    return result
