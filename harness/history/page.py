"""The history as one self-contained HTML page: no network; its tables need no JavaScript."""

from __future__ import annotations

import functools
import hashlib
import html
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import numpy as np

from converge_harness import __version__
from converge_harness.history.overview import Move, SetHistory
from converge_harness.history.query import Changed
from converge_harness.history.trend import DEFINITION, FEWEST, StepChange, Trend
from converge_harness.model import Judgement, Outcome
from converge_harness.report.renderers.assets import packed_plotly, resource, source, typed_array
from converge_harness.report.renderers.palette import SYMBOLS
from converge_harness.report.sanitize import plain
from converge_harness.report.text import ABSENT, anchors, digits
from converge_harness.wording import counted

PACKAGE = "converge_harness.history"
STRIP = 40
"""Number of newest nights whose verdicts the table shows."""
_COMMIT = 10
"""Digits shown of a commit or a digest."""
_LABELLED = 3
"""Most changed circumstances in the label of a mark; the table has them all."""


def to_page(sets: Sequence[SetHistory], *, source_file: str, generated: datetime) -> str:
    """Render the page.

    jinja2 escapes everything from users, also inside the inline JSON. The page's content security
    policy allows only scripts with its nonce, and no network.
    """
    fragments = anchors([f"{each.experiment} {each.name}" for each in sets])
    payload = {
        "symbols": {word.value: SYMBOLS[word] for word in Judgement},
        "sets": {
            fragment: _set_payload(each) for fragment, each in zip(fragments, sets, strict=True)
        },
    }
    shown = [(each, fragment) for each, fragment in zip(sets, fragments, strict=True)]
    moved = [(each, fragment, move) for each, fragment in shown for move in each.moves]
    nonce = hashlib.sha256(json.dumps(payload).encode()).hexdigest()[:32]
    return (
        _environment()
        .get_template("history.html.j2")
        .render(
            sets=shown,
            moved=sorted(moved, key=lambda row: row[2].lead.first_after.finished, reverse=True),
            headline=headline(sets),
            young=young(sets),
            fewest=FEWEST,
            several=len({each.experiment for each in sets}) > 1,
            payload=payload,
            nonce=nonce,
            source_file=source_file,
            generated=generated,
            css=resource("report.css"),
            dark=resource("dark.css"),
            own_css=resource("history.css", PACKAGE),
            javascript=resource("history.js", PACKAGE),
            plotly=packed_plotly(),
            version=__version__,
        )
    )


def headline(sets: Sequence[SetHistory]) -> str:
    """One sentence: the current state, and since when."""
    if not sets:
        return "No night is in the history."
    bad = [each for each in sets if each.verdict is not Judgement.PASS]
    nights = len({night.number for each in sets for night in each.nights})
    worse = [move.lead for each in sets for move in each.moves if move.lead.worse]
    if worse:
        last = max(worse, key=lambda step: step.first_after.finished)
        stepped = f"the last step upwards was in the night of {day(last.first_after.finished)}"
    elif young(sets):
        stepped = "too few to tell a trend"
    else:
        stepped = "no deviation went up for good"
    total = counted(len(sets), "test set")
    fail = "does not pass" if len(bad) == 1 else "do not pass"
    state = f"{len(bad)} of {total} {fail}" if bad else f"{total}, and nothing but PASS"
    return f"{state}; over {counted(nights, 'night')}, {stepped}."


def young(sets: Sequence[SetHistory]) -> bool:
    """Whether no set has enough nights for a step to be detected."""
    return all(len(each.nights) < FEWEST for each in sets)


def changes_text(changed: Sequence[Changed], most: int | None = None) -> str:
    """What changed, as text: ``torch 2.12.0 → 2.13.0, commit 01234 → 56789``."""
    if not changed:
        return "nothing that is recorded; look at the machine"
    # Versions and drivers first: a commit changes every night.
    ordered = sorted(changed, key=lambda each: each.name in ("commit", "rank code"))
    words = [_change(each) for each in ordered]
    left = 0 if most is None else len(words) - most
    return ", ".join(words[:most]) + (f" and {left} more" if left > 0 else "")


def day(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%d")


def _change(changed: Changed) -> str:
    if changed.name == DEFINITION:
        return "the experiment file"
    before, after = (_short(changed.name, value) for value in (changed.before, changed.after))
    return f"{plain(changed.name)} {before} → {after}"


def _short(name: str, value: str) -> str:
    if not value:
        return "unknown"
    if name in ("commit", "rank code"):
        commit, dash, dirty = value.partition("-")
        return plain(f"{commit[:_COMMIT]}{dash}{dirty}")
    return plain(value)


def _set_payload(each: SetHistory) -> dict[str, Any]:
    index = {night.number: place for place, night in enumerate(each.nights)}
    return {
        "nights": [night.finished.astimezone(UTC).isoformat() for night in each.nights],
        "verdicts": [night.verdict.value for night in each.nights],
        "commits": [
            _short("commit", night.circumstances.get("commit", "")) for night in each.nights
        ],
        "trends": [_trend_payload(trend, index) for trend in each.trends],
    }


def _trend_payload(trend: Trend, index: dict[int, int]) -> dict[str, Any]:
    series = trend.series
    places = np.array([index[int(night)] for night in series.nights])
    limits = np.where(series.limits > 0, series.limits, np.nan)
    return {
        "check": plain(series.check),
        "places": typed_array(places.astype("<i4")),
        "heights": typed_array((10**trend.decades).astype("<f4")),
        "measured": [digits(value) for value in series.measured.tolist()],
        "limits": typed_array(limits.astype("<f4")),
        "outside": [
            place for place, outcome in enumerate(series.outcomes) if outcome is not Outcome.PASS
        ],
        "steps": [
            {
                "place": index[step.first_after.number],
                "worse": step.worse,
                # Plotly interprets text as a subset of HTML, and text between dollar signs as TeX.
                "text": html.escape(changes_text(step.changed, _LABELLED), quote=False).replace(
                    "$", "&#36;"
                ),
            }
            for step in trend.steps
        ],
    }


def _rest(move: Move) -> str:
    more = len(move.steps) - 1
    return f" and {more} more" if more else ""


def _went(step: StepChange) -> str:
    return f"{digits(step.before)} → {digits(step.after)}"


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: source(name, PACKAGE)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plain": plain, "day": day, "rest": _rest, "went": _went}
    environment.filters |= {"changes_text": changes_text, "counted": counted}
    environment.globals |= {"SYMBOLS": SYMBOLS, "ABSENT": ABSENT, "STRIP": STRIP}
    return environment
