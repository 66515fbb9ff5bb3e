"""The body of an issue, a comment or a mail about a bad night, as Markdown; pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime

from harness.history import Entry, NightMark
from harness.night.news import BadSet, Night
from harness.report.report_markdown import escape, fenced
from harness.report.text import plain, plain_block, tail

MOST_CHARACTERS = 40_000
"""Of what is told set by set; GitHub refuses an issue or a comment of more than 65,536."""
LISTED = 100
"""Test sets that one sentence names."""
LOG_LINES = 30
"""Of what a failed command said, in a message."""


def body(night: Night, note: str = "") -> str | None:
    """What to tell of a night; None when it has no news, whether it was good or bad.

    ``note`` is told under the title.
    """
    if not night.news:
        return None
    first = night.news[0].entry
    when = f"{first.finished:%Y-%m-%d %H:%M} UTC"
    title = f"{escape(plain(first.experiment))}: {_count(len(night.news))} bad for the first time"
    blocks = [
        f"**{title}** ({when})",
        *([escape(plain(note))] if note else []),
        *_sets(night.news),
    ]
    told = [each.entry for each in night.bad if each.told]
    if told:
        blocks.append(f"Still bad, told of before: {_listed(told)}.")
    if night.recovered:
        blocks.append(f"Good again: {_listed(night.recovered)}.")
    report, name = shlex.quote(plain(first.report)), shlex.quote(plain(first.experiment))
    commands = f"converge report {report}\nconverge history {name} --html history.html"
    blocks += ["What to do next stands in docs/nightly.md.", fenced(commands, "console")]
    return "\n\n".join(blocks) + "\n"


def nothing_judged(
    experiment: str, when: datetime, last: NightMark | None, log: str, history: str = ""
) -> str:
    """What to tell of a night that came to no report.

    Args:
        experiment: its name.
        when: the night ended.
        last: the newest night that judged something; None when there was none.
        log: what `converge run` said; its last lines are quoted.
        history: why the history was of no help; empty when it was.
    """
    title = f"{escape(plain(experiment))}: nothing was judged"
    blocks = [
        f"**{title}** ({when:%Y-%m-%d %H:%M} UTC)",
        "The matrix ended without a report, so no test set has an answer.",
    ]
    if history:
        blocks.append(escape(plain(history)))
    elif last is None:
        blocks.append("No night of this history has ever judged anything.")
    else:
        blocks.append(f"The last night that judged something was {last.finished:%Y-%m-%d}.")
    if said := tail(plain_block(log), LOG_LINES):
        blocks += ["What it said last:", fenced(said)]
    blocks.append("What to do next stands in docs/nightly.md.")
    return "\n\n".join(blocks) + "\n"


def _sets(bad: Sequence[BadSet]) -> Iterator[str]:
    """A block for each, as long as they fit; of the others the names that fit."""
    room = MOST_CHARACTERS
    for place, each in enumerate(bad):
        block = _set(each)
        room -= len(block)
        if room < 0:
            rest = _listed([each.entry for each in bad[place:]])
            yield f"There is no room to tell more of {rest}: see the report."
            return
        yield block


def _set(bad: BadSet) -> str:
    entry = bad.entry
    kind = f" ({entry.cause_class})" if entry.cause_class else ""
    onset = f", from step {entry.onset}" if entry.onset is not None else ""
    lines = [f"### {entry.verdict}: {escape(plain(entry.test_set))}{kind}{onset}"]
    lines.append(escape(plain(entry.cause)) or "No cause is named.")
    if bad.last_good is None:
        lines.append("It has never passed in this history.")
    else:
        lines.append(f"It passed last on {bad.last_good.finished:%Y-%m-%d}.")
        lines += [
            f"- {escape(plain(name))}: {_value(then)} → {_value(now)}"
            for name, then, now in bad.changed
        ] or ["No circumstance that is recorded has changed since."]
    return "\n".join(f"{line}\n" if not line.startswith("- ") else line for line in lines).rstrip()


def _value(text: str) -> str:
    return escape(plain(text)) or "unknown"


def _listed(entries: Sequence[Entry]) -> str:
    named = ", ".join(
        f"{escape(plain(each.test_set))} ({each.verdict})" for each in entries[:LISTED]
    )
    return named + (f" and {len(entries) - LISTED} more" if entries[LISTED:] else "")


def _count(amount: int) -> str:
    return "1 test set is" if amount == 1 else f"{amount} test sets are"
