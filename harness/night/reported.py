"""Results of a night that the history does not hold, read from its ``report.json``; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from harness.history import Entry
from harness.model import CauseClass, Judgement


def reported(
    document: Mapping[str, Any], folder: str, before: Sequence[Entry] = ()
) -> tuple[Entry, ...]:
    """The test sets of a report, as the night after all those before it.

    Args:
        document: ``report.json``.
        folder: that it lies in.
        before: earlier results of the experiment, newest first. What the report does not tell of
            the circumstances (driver, commit) is taken to be as it was in the newest of them.

    Raises:
        KeyError, TypeError, ValueError: it is no report of ours.
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
