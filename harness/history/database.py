"""``history.sqlite``: nights go in, one transaction each; listings and trends come out.

Several processes may have the file open at once. Its version is ``PRAGMA user_version``: a later
change of the tables is a new entry of :data:`MIGRATIONS`; released entries are never edited.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import psutil

from converge_harness.errors import HistoryError
from converge_harness.history.query import Entry, Filter, NightMark, Series, SetNight, stamp
from converge_harness.history.record import Measurement, Night, Result
from converge_harness.model import CauseClass, Judgement, Outcome, Tier

_ALL = -1
"""LIMIT -1 means no limit in SQLite."""
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


@dataclass(frozen=True, slots=True)
class History:
    """A history file, which need not exist yet. Every method opens and closes it."""

    path: Path

    def append(self, night: Night) -> bool:
        """Add a night, completely or not at all; False if it is not new.

        It is not new if the newest night of the experiment has the same day (UTC) and content: then
        the same runs were judged again.

        Raises:
            HistoryError: the file cannot be written, is damaged, or is from a newer release.
        """
        with opened(self.path) as connection, transaction(connection):
            if is_known(connection, night):
                return False
            insert(connection, night)
        return True

    def append_all(self, nights: Iterable[Night]) -> None:
        """Add many nights in one transaction, without checking whether they are new.

        Raises:
            HistoryError: as :meth:`append`; then none of them is there.
        """
        with opened(self.path) as connection, transaction(connection):
            for night in nights:
                insert(connection, night)

    def experiments(self) -> dict[str, str]:
        """Every experiment's name, and the file from which it was last read.

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
        """Names of an experiment's test sets, those of the newest night first.

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
        """The newest nights of an experiment, newest first, including those that judged nothing.

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
        """The experiment of the newest night that was reported to a folder; None if there is none.

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
        """Results that match a filter, newest night first.

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
        """What the checks of a listed result measured, in the order of the checks.

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
        """All nights of a test set, or the newest ``limit``, oldest first.

        Raises:
            HistoryError: as :meth:`experiments`.
        """
        with self._read() as connection:
            rows = connection.execute(
                "SELECT r.night_id, r.verdict, r.definition, r.techniques, n.finished, c.facts "
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
                    techniques=row["techniques"],
                )
                for row in reversed(rows)
            )

    def series(
        self, experiment: str, test_set: str, since_night: int = 0, check: str | None = None
    ) -> tuple[Series, ...]:
        """What one check or all checks of a test set measured, in the order of the checks.

        Checks that never measured anything are left out. ``since_night`` is the number of the first
        night to return.

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
                f"{self.path}: no history yet; `converge run` adds to it, and --history FILE "
                "chooses another one"
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
        measured=np.array(measured, dtype=np.float64),  # the text "nan" becomes NaN
        limits=np.array(limits, dtype=np.float64),  # None becomes NaN
        outcomes=tuple(map(_OUTCOMES.__getitem__, outcomes)),
    )


def _facts(rows: Iterable[sqlite3.Row]) -> dict[str, dict[str, str]]:
    """Parsed circumstances by their JSON text; the results of a night share it."""
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
        techniques=row["techniques"],
    )


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def is_known(connection: sqlite3.Connection, night: Night) -> bool:
    """Whether the newest night of its experiment has the same day (UTC) and content."""
    newest = connection.execute(
        "SELECT finished, content FROM nights WHERE experiment = ? ORDER BY id DESC LIMIT 1",
        (text_of(night.experiment),),
    ).fetchone()
    if newest is None or newest["content"] != night.content:
        return False
    day = slice(len("2026-01-31"))
    return bool(newest["finished"][day] == stamp(night.finished)[day])


def insert(connection: sqlite3.Connection, night: Night) -> None:
    """Add a night with its results and their measurements."""
    facts = json.dumps(dict(night.circumstances), sort_keys=True)
    connection.execute("INSERT OR IGNORE INTO circumstances (facts) VALUES (?)", (facts,))
    number = connection.execute(
        "INSERT INTO nights (experiment, source, finished, circumstances_id, content, wall_s, "
        "report) VALUES (?, ?, ?, (SELECT id FROM circumstances WHERE facts = ?), ?, ?, ?)",
        (
            *(text_of(night.experiment), text_of(night.source), stamp(night.finished), facts),
            *(night.content, night.wall_s, text_of(night.report)),
        ),
    ).lastrowid
    for result in night.results:
        connection.execute(
            "INSERT INTO results (night_id, experiment, test_set, control, verdict, cause_class, "
            "cause, onset, wall_s, reused, definition, techniques) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(number, text_of(night.experiment)),
                *(text_of(result.test_set), text_of(result.control)),
                result.verdict.value,
                result.cause_class and result.cause_class.value,
                *(text_of(result.cause), result.onset, result.wall_s, result.reused),
                *(result.definition, text_of(result.techniques)),
            ),
        )
        _insert_measurements(connection, number, night.experiment, result)


def _insert_measurements(
    connection: sqlite3.Connection, number: int | None, experiment: str, result: Result
) -> None:
    of_set = (text_of(experiment), text_of(result.test_set))
    known = _series_ids(connection, of_set)
    new = [each for each in result.measurements if each.check not in known]
    if new:
        connection.executemany(
            "INSERT INTO series (experiment, test_set, name, tier, unit) VALUES (?, ?, ?, ?, ?)",
            [(*of_set, each.check, each.tier.value, each.unit) for each in new],
        )
        known = _series_ids(connection, of_set)
    connection.executemany(
        "INSERT INTO measurements VALUES (?, ?, ?, ?, ?)",
        [
            (
                *(known[each.check], number, each.outcome.value),
                *(_spelt(each.measured), _spelt(each.limit)),
            )
            for each in result.measurements
        ],
    )


def _series_ids(connection: sqlite3.Connection, of_set: tuple[str, str]) -> dict[str, int]:
    rows = connection.execute(
        "SELECT name, id FROM series WHERE experiment = ? AND test_set = ?", of_set
    )
    return {row["name"]: row["id"] for row in rows}


def text_of(value: str) -> str:
    """Text that can be encoded in UTF-8: a path or a log may contain lone surrogates."""
    return value.encode(errors="replace").decode()


def _spelt(value: float | None) -> float | str | None:
    """NaN as text, because SQLite would store it as NULL."""
    return "nan" if value is not None and math.isnan(value) else value


PATIENCE_S = 60.0
"""How long a process waits for the transactions of others, which take milliseconds."""
APPLICATION = 0x436F6E76
"""``PRAGMA application_id`` of history files: "Conv"."""
_SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse.")
"""Prefixes of the types of file systems that several machines may mount."""


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    type: str


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A history file in autocommit mode, made or migrated if necessary.

    A file without write permission is opened read-only.

    Raises:
        HistoryError: for every error of the file, here or in the block.
    """
    try:
        read_only = path.is_file() and not os.access(path.parent, os.W_OK)
        if not read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_connect(path, read_only=read_only)) as connection:
            _refuse_foreign(connection)
            if not read_only:
                _set_journal(connection, path)
                connection.execute("PRAGMA foreign_keys = ON")
            migrate(connection, APPLICATION)
            yield connection
    except HistoryError as error:
        raise HistoryError(f"{path}: {error}") from None
    except sqlite3.OperationalError as error:
        raise HistoryError(f"{path}: {error}; give another --history FILE") from error
    except (sqlite3.DatabaseError, ValueError, KeyError) as error:
        raise HistoryError(
            f"{path}: damaged ({error}); move it away, and the next `converge run` starts a new one"
        ) from error
    except OSError as error:
        raise HistoryError(
            f"{path}: {error.strerror or error}; give another --history FILE"
        ) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction, with no other writer in between."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # on a full disk SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def journal_mode(path: Path, mounts: Iterable[Mount]) -> str:
    """``WAL``, or ``DELETE`` on a file system that other machines may also mount.

    Readers and one writer of a write-ahead log share memory, so all of them must be on one machine
    (https://www.sqlite.org/wal.html, "WAL does not work over a network filesystem").
    """
    parents = {str(parent) for parent in path.absolute().parents}
    holding = [mount for mount in mounts if mount.point in parents]
    nearest = max(holding, key=lambda mount: len(mount.point), default=Mount("/", ""))
    return "DELETE" if nearest.type.startswith(_SHARED) else "WAL"


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    # In a read-only folder SQLite cannot make the files that readers of a WAL share.
    mode = "?mode=ro&immutable=1" if read_only else ""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}{mode}", uri=True, timeout=PATIENCE_S, isolation_level=None
    )
    connection.row_factory = sqlite3.Row
    return connection


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    # Tables first: a process that makes the file at this moment writes both in one transaction, so
    # whoever sees its tables also sees its id.
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION and (application or tables):
        raise HistoryError("a database of another program; give another --history FILE")


def _set_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Set the journal mode; SQLite itself does not wait for a lock here."""
    mounts = [Mount(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]
    mode = journal_mode(path, mounts)
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}")
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


Migration: TypeAlias = Sequence[str]
"""The statements that migrate a file from one version to the next."""

MIGRATIONS: tuple[Migration, ...] = (
    (
        # What may explain a change; nights with the same circumstances share a row.
        """CREATE TABLE circumstances (
            id INTEGER PRIMARY KEY,
            facts TEXT NOT NULL UNIQUE
        )""",
        """CREATE TABLE nights (
            id INTEGER PRIMARY KEY,
            experiment TEXT NOT NULL,
            source TEXT NOT NULL,
            finished TEXT NOT NULL,
            circumstances_id INTEGER NOT NULL REFERENCES circumstances,
            content TEXT NOT NULL,
            wall_s REAL,
            report TEXT NOT NULL
        )""",
        "CREATE INDEX nights_by_experiment ON nights (experiment, id)",
        "CREATE INDEX nights_by_time ON nights (finished)",
        """CREATE TABLE results (
            id INTEGER PRIMARY KEY,
            night_id INTEGER NOT NULL REFERENCES nights,
            experiment TEXT NOT NULL,
            test_set TEXT NOT NULL,
            control TEXT NOT NULL,
            verdict TEXT NOT NULL,
            cause_class TEXT,
            cause TEXT NOT NULL,
            onset INTEGER,
            wall_s REAL,
            reused INTEGER NOT NULL,
            definition TEXT NOT NULL,
            UNIQUE (experiment, test_set, night_id)
        )""",
        "CREATE INDEX results_by_night ON results (night_id)",
        "CREATE INDEX results_by_set ON results (test_set, night_id)",
        "CREATE INDEX results_by_verdict ON results (verdict, night_id)",
        """CREATE TABLE series (
            id INTEGER PRIMARY KEY,
            experiment TEXT NOT NULL,
            test_set TEXT NOT NULL,
            name TEXT NOT NULL,
            tier TEXT NOT NULL,
            unit TEXT NOT NULL,
            UNIQUE (experiment, test_set, name)
        )""",
        # By series first, so that a trend is contiguous in the file, however many nights there are.
        """CREATE TABLE measurements (
            series_id INTEGER NOT NULL REFERENCES series,
            night_id INTEGER NOT NULL REFERENCES nights,
            outcome TEXT NOT NULL,
            measured REAL,
            limit_value REAL,
            PRIMARY KEY (series_id, night_id)
        ) WITHOUT ROWID""",
    ),
    ("ALTER TABLE results ADD COLUMN techniques TEXT NOT NULL DEFAULT ''",),
)


def version_of(connection: sqlite3.Connection) -> int:
    """The version of a file; 0 for one without tables."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(
    connection: sqlite3.Connection,
    application: int,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> None:
    """Migrate a file to the newest version, and set its application id, in one transaction.

    ``connection`` is in autocommit mode (``isolation_level`` None). Several processes may do this
    at once: the first one migrates, the others have nothing left to do.

    Raises:
        HistoryError: the file was written by a newer release.
        sqlite3.Error: it cannot be written; then it is unchanged.
    """
    target = len(migrations)
    if version_of(connection) == target:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for migration in migrations[_known_version(connection, target) :]:
            for statement in migration:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {application}")
        connection.execute(f"PRAGMA user_version = {target}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # on a full disk SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise


def _known_version(connection: sqlite3.Connection, target: int) -> int:
    found = version_of(connection)
    if found > target:
        raise HistoryError(
            f"written with version {found} by a newer converge; this one reads up to {target}: "
            "upgrade converge, or give another --history FILE"
        )
    return found
