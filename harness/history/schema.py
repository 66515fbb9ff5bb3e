"""The tables of ``history.sqlite``, and how a file of an older version becomes one of today's.

The version of a file is its ``PRAGMA user_version``. A later change of the tables is one more entry
of :data:`MIGRATIONS`; entries that were released are never edited.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TypeAlias

from harness.errors import HistoryError

Migration: TypeAlias = Sequence[str]
"""The statements that bring a file from one version to the next."""

MIGRATIONS: tuple[Migration, ...] = (
    (
        # What may explain a change; nights share a row as long as nothing does.
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
        # By series first: a trend is then one stretch of the file, however many nights there are.
        """CREATE TABLE measurements (
            series_id INTEGER NOT NULL REFERENCES series,
            night_id INTEGER NOT NULL REFERENCES nights,
            outcome TEXT NOT NULL,
            measured REAL,
            limit_value REAL,
            PRIMARY KEY (series_id, night_id)
        ) WITHOUT ROWID""",
    ),
)


def version_of(connection: sqlite3.Connection) -> int:
    """The version of a file; 0 for one without tables."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(
    connection: sqlite3.Connection,
    application: int,
    migrations: Sequence[Migration] = MIGRATIONS,
) -> None:
    """Bring a file to the newest version, and mark whose it is, in one transaction.

    ``connection`` is in autocommit mode (``isolation_level`` None). Several processes may do this
    at once: the first one migrates, the others find it done.

    Raises:
        HistoryError: the file was written by a newer release.
        sqlite3.Error: it cannot be written; it is then as it was.
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
        if connection.in_transaction:  # on a full disk SQLite has rolled back itself
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
