"""``history.sqlite``: nights go in, one transaction each; listings and trends come out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from harness.errors import HistoryError
from harness.history.file import opened, transaction
from harness.history.nights import insert, is_known, text_of
from harness.history.query import Entry, Filter, NightMark, Series, SetNight
from harness.history.record import Measurement, Night
from harness.model import CauseClass, Judgement, Outcome, Tier

_ALL = -1
"""A LIMIT of SQLite that is none."""
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


@dataclass(frozen=True, slots=True)
class History:
    """A history file, which need not exist yet. Every method opens and closes it."""

    path: Path

    def append(self, night: Night) -> bool:
        """Add a night, whole or not at all; False where it says nothing new.

        That is when the newest night of the experiment is of the same day (UTC) and has the same
        content: somebody judged the same runs again.

        Raises:
            HistoryError: the file cannot be written, is damaged, or of a newer release.
        """
        with opened(self.path) as connection, transaction(connection):
            if is_known(connection, night):
                return False
            insert(connection, night)
        return True

    def append_all(self, nights: Iterable[Night]) -> None:
        """Add many nights in one transaction, without asking whether they say anything new.

        Raises:
            HistoryError: as :meth:`append`; then none of them is there.
        """
        with opened(self.path) as connection, transaction(connection):
            for night in nights:
                insert(connection, night)

    def experiments(self) -> dict[str, str]:
        """Name of every experiment, and the file that it was last read from.

        Raises:
            HistoryError: there is no such file, or it cannot be read.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT experiment, source FROM nights WHERE id IN "
                "(SELECT max(id) FROM nights GROUP BY experiment) ORDER BY experiment"
            )
            return {row["experiment"]: row["source"] for row in rows}

    def test_sets(self, experiment: str) -> tuple[str, ...]:
        """Names of the test sets of an experiment, those of the newest night first.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT test_set, max(id) AS newest FROM results WHERE experiment = ? "
                "GROUP BY test_set ORDER BY max(night_id) DESC, newest",
                (experiment,),
            )
            return tuple(row["test_set"] for row in rows)

    def newest(self, experiment: str, limit: int) -> tuple[NightMark, ...]:
        """The newest nights of an experiment, newest first, also those that judged nothing.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT id, finished, report, EXISTS (SELECT 1 FROM results r "
                "WHERE r.night_id = n.id) AS judged FROM nights n WHERE experiment = ? "
                "ORDER BY id DESC LIMIT ?",
                (text_of(experiment), limit),
            )
            return tuple(
                NightMark(
                    number=row["id"],
                    finished=datetime.fromisoformat(row["finished"]),
                    report=row["report"],
                    judged=bool(row["judged"]),
                )
                for row in rows
            )

    def experiment_of(self, report: str) -> str | None:
        """The experiment whose newest night was reported to a folder; None when none was.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            row = connection.execute(
                "SELECT experiment FROM nights WHERE report = ? ORDER BY id DESC LIMIT 1",
                (text_of(report),),
            ).fetchone()
            return str(row["experiment"]) if row else None

    def listing(self, wanted: Filter) -> tuple[Entry, ...]:
        """Results that a filter lets through, newest night first.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        clauses, values = wanted.sql()
        with self._read() as connection:
            rows = connection.execute(
                "SELECT r.*, n.source, n.finished, n.report, c.facts, ("  # noqa: S608 - no values
                "SELECT verdict FROM results b WHERE b.experiment = r.experiment "
                "AND b.test_set = r.test_set AND b.night_id < r.night_id "
                "ORDER BY b.night_id DESC LIMIT 1) AS previous "
                "FROM results r JOIN nights n ON n.id = r.night_id "
                f"JOIN circumstances c ON c.id = n.circumstances_id {clauses}",
                values,
            ).fetchall()
            facts = _facts(rows)
            return tuple(_entry(row, facts[row["facts"]]) for row in rows)

    def measurements(self, entry: Entry) -> tuple[Measurement, ...]:
        """What the checks of a listed result found, in the order in which they are asked.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT s.name, s.tier, s.unit, m.outcome, m.measured, m.limit_value "
                "FROM series s JOIN measurements m ON m.series_id = s.id AND m.night_id = ? "
                "WHERE s.experiment = ? AND s.test_set = ? ORDER BY s.id",
                (entry.night, entry.experiment, entry.test_set),
            )
            return tuple(
                Measurement(
                    check=row["name"],
                    tier=Tier(row["tier"]),
                    outcome=Outcome(row["outcome"]),
                    measured=_number(row["measured"]),
                    limit=_number(row["limit_value"]),
                    unit=row["unit"],
                )
                for row in rows
            )

    def nights(
        self, experiment: str, test_set: str, newest: int | None = None
    ) -> tuple[SetNight, ...]:
        """Every night of a test set, or the newest so many, oldest first.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT r.night_id, r.verdict, r.definition, n.finished, c.facts "
                "FROM results r JOIN nights n ON n.id = r.night_id "
                "JOIN circumstances c ON c.id = n.circumstances_id "
                "WHERE r.experiment = ? AND r.test_set = ? ORDER BY r.night_id DESC LIMIT ?",
                (experiment, test_set, _ALL if newest is None else newest),
            ).fetchall()
            facts = _facts(rows)
            return tuple(
                SetNight(
                    number=row["night_id"],
                    finished=datetime.fromisoformat(row["finished"]),
                    verdict=Judgement(row["verdict"]),
                    circumstances=facts[row["facts"]],
                    definition=row["definition"],
                )
                for row in reversed(rows)
            )

    def series(
        self, experiment: str, test_set: str, since_night: int = 0, check: str | None = None
    ) -> tuple[Series, ...]:
        """What every check of a test set, or one, measured, in the order in which they are asked.

        Checks that never measured anything are left out. ``since_night`` is the number of the
        first night wanted.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            found = connection.execute(
                "SELECT id, name, tier, unit FROM series "
                "WHERE experiment = ? AND test_set = ? AND name = coalesce(?, name) ORDER BY id",
                (experiment, test_set, check),
            ).fetchall()
            every = (_series(connection, row, since_night) for row in found)
            return tuple(each for each in every if each.nights.size)

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        if not self.path.is_file():
            raise HistoryError(
                f"{self.path}: no history yet; `converge run` adds to it, and --history FILE names "
                "another one"
            )
        with opened(self.path) as connection:
            yield connection


def _series(connection: sqlite3.Connection, row: sqlite3.Row, since_night: int) -> Series:
    points = connection.execute(
        "SELECT night_id, outcome, measured, limit_value FROM measurements "
        "WHERE series_id = ? AND night_id >= ? AND measured IS NOT NULL ORDER BY night_id",
        (row["id"], since_night),
    ).fetchall()
    nights, outcomes, measured, limits = zip(*points, strict=True) if points else ((), (), (), ())
    return Series(
        check=row["name"],
        tier=Tier(row["tier"]),
        unit=row["unit"],
        nights=np.array(nights, dtype=np.int64),
        measured=np.array(measured, dtype=np.float64),  # the word nan becomes the number
        limits=np.array(limits, dtype=np.float64),  # None becomes NaN
        outcomes=tuple(map(_OUTCOMES.__getitem__, outcomes)),
    )


def _facts(rows: Iterable[sqlite3.Row]) -> dict[str, dict[str, str]]:
    """Circumstances by the text that holds them, each read once: results of a night share it."""
    return {text: json.loads(text) for text in {row["facts"] for row in rows}}


def _entry(row: sqlite3.Row, circumstances: Mapping[str, str]) -> Entry:
    return Entry(
        night=row["night_id"],
        finished=datetime.fromisoformat(row["finished"]),
        experiment=row["experiment"],
        source=row["source"],
        test_set=row["test_set"],
        control=row["control"],
        verdict=Judgement(row["verdict"]),
        previous=Judgement(row["previous"]) if row["previous"] else None,
        cause_class=CauseClass(row["cause_class"]) if row["cause_class"] else None,
        cause=row["cause"],
        onset=row["onset"],
        wall_s=row["wall_s"],
        reused=bool(row["reused"]),
        circumstances=circumstances,
        report=row["report"],
    )


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)
