"""One night as rows of the history's tables; whoever calls has the transaction."""

from __future__ import annotations

import json
import math
import sqlite3

from harness.history.query import stamp
from harness.history.record import Night, Result


def is_known(connection: sqlite3.Connection, night: Night) -> bool:
    """Whether the newest night of its experiment is of the same day (UTC) and content."""
    newest = connection.execute(
        "SELECT finished, content FROM nights WHERE experiment = ? ORDER BY id DESC LIMIT 1",
        (text_of(night.experiment),),
    ).fetchone()
    if newest is None or newest["content"] != night.content:
        return False
    day = slice(len("2026-01-31"))
    return bool(newest["finished"][day] == stamp(night.finished)[day])


def insert(connection: sqlite3.Connection, night: Night) -> None:
    """Add a night with its results and all that they measured."""
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
            "cause, onset, wall_s, reused, definition) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(number, text_of(night.experiment)),
                *(text_of(result.test_set), text_of(result.control)),
                result.verdict.value,
                result.cause_class and result.cause_class.value,
                *(text_of(result.cause), result.onset, result.wall_s, result.reused),
                result.definition,
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
    """Text that UTF-8 has a form for: a path or a log may hold lone surrogates."""
    return value.encode(errors="replace").decode()


def _spelt(value: float | None) -> float | str | None:
    """SQLite stores NaN as NULL, and a word in a column of numbers as a word."""
    return "nan" if value is not None and math.isnan(value) else value
