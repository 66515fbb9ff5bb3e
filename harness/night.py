"""The message about a night of a nightly gate: a failure is reported once, not every night. Pure.

``night`` finds what is new among the results of an experiment, ``reported`` reads results from a
``report.json`` if the history has none, and ``body`` writes the Markdown of an issue, a comment or
a mail.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from converge_harness.history import Changed, Entry, NightMark, changed_between
from converge_harness.model import CauseClass, Judgement
from converge_harness.report.renderers.markdown import escape, fenced
from converge_harness.report.sanitize import plain, plain_block
from converge_harness.report.text import tail
from converge_harness.wording import counted


@dataclass(frozen=True, slots=True)
class BadSet:
    """A test set that did not PASS."""

    entry: Entry
    already_reported: bool
    """Whether a night since its last PASS had the same verdict and class of cause."""
    last_good: Entry | None
    """Its newest PASS; None when it never had one."""

    @property
    def changed(self) -> tuple[Changed, ...]:
        """Circumstances that differ from the last good night; empty if there was none."""
        if self.last_good is None:
            return ()
        return changed_between(self.last_good.circumstances, self.entry.circumstances)


@dataclass(frozen=True, slots=True)
class NightReport:
    """One night of an experiment, as it is reported to people."""

    bad: tuple[BadSet, ...]
    recovered: tuple[Entry, ...]
    """Sets that PASS and did not in the night before."""

    @property
    def news(self) -> tuple[BadSet, ...]:
        """Bad sets that were not reported yet."""
        return tuple(each for each in self.bad if not each.already_reported)


def night(entries: Iterable[Entry], number: int) -> NightReport:
    """Night ``number`` of an experiment; ``entries`` are newest first, later nights are ignored.

    A set is reported once per verdict and class of cause since its last PASS. So one that goes from
    FAIL to ERROR and back is reported twice, not three times.
    """
    known = [entry for entry in entries if entry.night <= number]
    tonight = [entry for entry in known if entry.night == number]
    before = [entry for entry in known if entry.night < number]
    return NightReport(
        bad=tuple(
            _bad(entry, [each for each in before if each.test_set == entry.test_set])
            for entry in tonight
            if entry.verdict is not Judgement.PASS
        ),
        recovered=tuple(
            entry
            for entry in tonight
            if entry.verdict is Judgement.PASS and entry.previous not in (None, Judgement.PASS)
        ),
    )


def _bad(entry: Entry, before: Sequence[Entry]) -> BadSet:
    """``before``: earlier results of the same set, newest first."""
    good = next((at for at, each in enumerate(before) if each.verdict is Judgement.PASS), None)
    since = before[:good]
    return BadSet(
        entry=entry,
        already_reported=any(_state(each) == _state(entry) for each in since),
        last_good=None if good is None else before[good],
    )


def _state(entry: Entry) -> tuple[object, ...]:
    return entry.verdict, entry.cause_class


def reported(
    document: Mapping[str, Any], folder: str, before: Sequence[Entry] = ()
) -> tuple[Entry, ...]:
    """The test sets of a report, as the night that follows ``before``.

    Args:
        document: ``report.json``. folder: the folder it is in. before: earlier results of the
        experiment, newest first. Circumstances that the report does not name (driver, commit) are
        copied from the newest of them.

    Raises:
        KeyError, TypeError, ValueError: it is not a report of converge.
    """
    known = dict(before[0].circumstances) if before else {}
    last = {entry.test_set: entry.verdict for entry in reversed(before)}
    when = datetime.strptime(document["generated"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    return tuple(
        Entry(
            night=before[0].night + 1 if before else 1,
            finished=when,
            experiment=document["experiment"],
            source=document["source"],
            test_set=test["name"],
            control=test["control"],
            verdict=Judgement(test["verdict"]),
            previous=last.get(test["name"]),
            cause_class=CauseClass(test["cause_class"]) if test["cause_class"] else None,
            cause=test["cause"],
            onset=test["onset_step"],
            wall_s=test["wall_s"],
            reused=test["reused"],
            circumstances={**known, **document["versions"]},
            report=folder,
        )
        for test in document["tests"]
    )


MOST_CHARACTERS = 40_000
"""Limit of the part about single sets; GitHub refuses issues and comments above 65,536."""
LISTED = 100
"""Most test sets that one sentence names."""
LOG_LINES = 30
"""Lines of a failed command's output that are quoted."""


def body(night: NightReport, note: str = "") -> str | None:
    """The message about a night; None if there is no news, whether the night was good or bad.

    ``note`` goes under the title.
    """
    if not night.news:
        return None
    first = night.news[0].entry
    when = f"{first.finished:%Y-%m-%d %H:%M} UTC"
    new = f"{counted(len(night.news), 'test set')} {'is' if len(night.news) == 1 else 'are'}"
    title = f"{escape(plain(first.experiment))}: {new} bad for the first time"
    blocks = [
        f"**{title}** ({when})",
        *([escape(plain(note))] if note else []),
        *_sets(night.news),
    ]
    old = [each.entry for each in night.bad if each.already_reported]
    if old:
        blocks.append(f"Still bad, already reported: {_listed(old)}.")
    if night.recovered:
        blocks.append(f"Good again: {_listed(night.recovered)}.")
    report, name = shlex.quote(plain(first.report)), shlex.quote(plain(first.experiment))
    commands = f"converge report {report}\nconverge history {name} --html history.html"
    blocks += ["docs/nightly.md says what to do next.", fenced(commands, "console")]
    return "\n\n".join(blocks) + "\n"


def nothing_judged(
    experiment: str, when: datetime, last: NightMark | None, log: str, history: str = ""
) -> str:
    """The message about a night that ended without a report.

    Args:
        experiment: its name.
        when: when the night ended.
        last: the newest night that judged something; None when there was none.
        log: the output of `converge run`; its last lines are quoted.
        history: why the history could not be read; empty if it could.
    """
    title = f"{escape(plain(experiment))}: nothing was judged"
    blocks = [
        f"**{title}** ({when:%Y-%m-%d %H:%M} UTC)",
        "The matrix ended without a report, so no test set has a verdict.",
    ]
    if history:
        blocks.append(escape(plain(history)))
    elif last is None:
        blocks.append("No night of this history has ever judged anything.")
    else:
        blocks.append(f"The last night that judged something was {last.finished:%Y-%m-%d}.")
    if said := tail(plain_block(log), LOG_LINES):
        blocks += ["The last lines of its output:", fenced(said)]
    blocks.append("docs/nightly.md says what to do next.")
    return "\n\n".join(blocks) + "\n"


def _sets(bad: Sequence[BadSet]) -> Iterator[str]:
    """A block per set while they fit, then only names."""
    room = MOST_CHARACTERS
    for place, each in enumerate(bad):
        block = _set(each)
        room -= len(block)
        if room < 0:
            rest = _listed([each.entry for each in bad[place:]])
            yield f"No room for details of {rest}: see the report."
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
