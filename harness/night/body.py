"""The body of an issue, a comment or a mail about a bad night, as Markdown; pure."""

from __future__ import annotations

import shlex

from harness.history import Entry
from harness.night.news import BadSet, Night
from harness.report.report_markdown import escape, fenced
from harness.report.text import plain


def body(night: Night) -> str | None:
    """What to tell of a night; None when it has no news, whether it was good or bad."""
    if not night.news:
        return None
    first = night.news[0].entry
    when = f"{first.finished:%Y-%m-%d %H:%M} UTC"
    title = f"{escape(plain(first.experiment))}: {_count(len(night.news))} bad for the first time"
    blocks = [f"**{title}** ({when})", *(_set(each) for each in night.news)]
    told = [each.entry for each in night.bad if each.told]
    if told:
        blocks.append(f"Still bad, told of before: {_listed(told)}.")
    if night.recovered:
        blocks.append(f"Good again: {_listed(night.recovered)}.")
    report, name = shlex.quote(plain(first.report)), shlex.quote(plain(first.experiment))
    commands = f"converge report {report}\nconverge history {name} --html history.html"
    blocks += ["What to do next stands in docs/nightly.md.", fenced(commands, "console")]
    return "\n\n".join(blocks) + "\n"


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


def _listed(entries: tuple[Entry, ...] | list[Entry]) -> str:
    return ", ".join(f"{escape(plain(each.test_set))} ({each.verdict})" for each in entries)


def _count(amount: int) -> str:
    return "1 test set is" if amount == 1 else f"{amount} test sets are"
