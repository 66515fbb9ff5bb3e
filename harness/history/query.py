"""Queries to a history, and the values of their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from converge_harness.model import CauseClass, Judgement, Outcome, Tier

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which results are wanted; None means any."""

    experiment: str | None = None
    test_set: str | None = None
    verdict: Judgement | None = None
    since: datetime | None = None
    """With a time zone; compared with the night's time."""
    limit: int | None = None
    """At most this many results, the newest."""

    def sql(self) -> tuple[str, list[str | int]]:
        """The clauses after FROM, for ``results r`` and ``nights n``, and their parameters."""
        asked: dict[str, str | None] = {
            "r.experiment = ?": self.experiment,
            "r.test_set = ?": self.test_set,
            "r.verdict = ?": self.verdict.value if self.verdict else None,
            "n.finished >= ?": stamp(self.since) if self.since else None,
        }
        given = {clause: value for clause, value in asked.items() if value is not None}
        where = f"WHERE {' AND '.join(given)} " if given else ""
        limit = "" if self.limit is None else " LIMIT ?"
        values: list[str | int] = [*given.values(), *([] if self.limit is None else [self.limit])]
        return f"{where}ORDER BY r.night_id DESC, r.id{limit}", values


@dataclass(frozen=True, slots=True)
class Entry:
    """One test set of one night, as listed."""

    night: int
    """Number of the night in this file; later nights have larger numbers."""
    finished: datetime
    experiment: str
    source: str
    test_set: str
    control: str
    verdict: Judgement
    previous: Judgement | None
    """Its verdict in the night before; None in its first night."""
    cause_class: CauseClass | None
    cause: str
    onset: int | None
    wall_s: float | None
    reused: bool
    circumstances: Mapping[str, str]
    report: str
    techniques: str = ""
    """See :class:`converge_harness.history.Result`."""


@dataclass(frozen=True, slots=True)
class NightMark:
    """A night, and whether it judged anything."""

    number: int
    """As :attr:`Entry.night`."""
    finished: datetime
    report: str
    judged: bool
    """False: nothing was launched, or there was no report."""


@dataclass(frozen=True, slots=True)
class SetNight:
    """One night of a test set: what was judged, and under which circumstances."""

    number: int
    """As :attr:`Entry.night`."""
    finished: datetime
    verdict: Judgement
    circumstances: Mapping[str, str]
    definition: str
    """See :class:`converge_harness.history.Result`."""
    techniques: str = ""
    """See :class:`converge_harness.history.Result`."""


@dataclass(frozen=True, slots=True)
class Series:
    """What one check of a test set measured, oldest night first."""

    check: str
    tier: Tier
    unit: str
    nights: npt.NDArray[np.int64]
    """Numbers of the nights in which it measured something; the others are missing."""
    measured: Numbers
    """May be NaN or infinite."""
    limits: Numbers
    """NaN where there is none."""
    outcomes: tuple[Outcome, ...]


class Changed(NamedTuple):
    """A circumstance that differs between two nights; an empty value was not known."""

    name: str
    before: str
    after: str


def changed_between(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Changed, ...]:
    """The circumstances that differ between two nights, sorted by name."""
    names = sorted({*before, *after})
    both = [Changed(name, before.get(name, ""), after.get(name, "")) for name in names]
    return tuple(each for each in both if each.before != each.after)


def stamp(time: datetime) -> str:
    """A time as stored: ISO 8601, UTC, milliseconds; its order is that of time."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")
