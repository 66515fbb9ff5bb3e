"""The history file: what goes in comes out, whoever else writes, dies or has damaged it."""

import math
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from appending import CHECKS, SETS
from history_samples import START, VERSIONS, deviation, night, other_experiment, result
from small_disks import small_disk_at

from converge_harness.errors import HistoryError
from converge_harness.history import Filter, History
from converge_harness.history.database import APPLICATION, MIGRATIONS, Mount, journal_mode, migrate
from converge_harness.model import Judgement

HERE = Path(__file__).parent
FAIL = Judgement.FAIL


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "history.sqlite")


def appending(history, name, count):
    command = [sys.executable, str(HERE / "appending.py"), str(history.path), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent.parent)


def count_of(path, table):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]  # noqa: S608


# ------------------------------------------------------------------- in and out


def test_a_night_comes_out_as_it_went_in(history):
    endless = tuple(
        deviation(f"check-{size}", size) for size in (1.5e-300, 0.0, math.inf, math.nan, None)
    )
    wanted = result("tp2", FAIL, measurements=(*endless, deviation("no-limit", 1.0, None)))
    assert history.append(night(0, wanted))
    (entry,) = history.listing(Filter())
    assert (entry.experiment, entry.test_set, entry.control) == ("nightly", "tp2", "fsdp2")
    assert (entry.verdict, entry.cause_class, entry.cause, entry.onset) == (
        *(FAIL, wanted.cause_class, "The update is wrong.", 3),
    )
    assert (entry.finished, entry.wall_s, entry.reused) == (START, 12.5, False)
    assert entry.circumstances == VERSIONS
    measured = history.measurements(entry)
    assert repr(measured) == repr(wanted.measurements)  # NaN is not equal to itself


def test_hostile_names_are_only_names(history):
    hostile = "x'; DROP TABLE results; --\x00\udc80"
    history.append(replace(night(0, result(hostile)), experiment=hostile))
    (entry,) = history.listing(Filter())
    assert entry.test_set == hostile.replace("\udc80", "?")
    assert history.listing(Filter(test_set=entry.test_set)) == (entry,)


def test_a_listing_is_filtered_and_has_the_newest_night_first(history):
    for day in range(6):
        sets = (result("tp2", FAIL if day >= 4 else Judgement.PASS), result("pp2"))
        history.append(night(day, *sets))
        history.append(other_experiment(night(day, result("tp2")), "other"))
    every = history.listing(Filter(experiment="nightly"))
    assert [entry.finished for entry in every] == sorted(
        (entry.finished for entry in every), reverse=True
    )
    assert len(every) == 12
    failed = history.listing(Filter(verdict=FAIL))
    assert [entry.finished.day for entry in failed] == [6, 5]
    assert [entry.previous for entry in failed] == [FAIL, Judgement.PASS]
    since = Filter("nightly", "tp2", since=START + timedelta(days=3))
    assert [entry.finished.day for entry in history.listing(since)] == [6, 5, 4]
    assert [entry.test_set for entry in history.listing(Filter("nightly", limit=2))] == [
        *("tp2", "pp2")
    ]
    assert history.listing(Filter(experiment="nightly'")) == ()
    assert history.experiments() == {
        name: f"/lab/experiments/{name}.toml" for name in ("nightly", "other")
    }
    assert history.test_sets("nightly") == ("tp2", "pp2")


def test_since_knows_time_zones(history):
    history.append(night(0))
    assert history.listing(Filter(since=datetime.fromisoformat("2026-03-01T05:00+02:00")))
    assert not history.listing(Filter(since=datetime.fromisoformat("2026-03-01T05:00+01:00")))


def test_the_same_runs_judged_again_are_no_new_night(history):
    first = night(0)
    again = replace(first, finished=first.finished + timedelta(hours=2), wall_s=1.0)
    again = replace(again, results=tuple(replace(each, reused=True) for each in again.results))
    tomorrow = replace(again, finished=again.finished + timedelta(days=1))
    told = [
        (first, True),
        (again, False),
        (replace(again, runs="s" * 64), True),  # something ran for it
        (tomorrow, True),
        (tomorrow, False),
        (replace(tomorrow, circumstances=VERSIONS | {"converge": "9"}), True),
        (replace(tomorrow, results=(result(verdict=FAIL),)), True),
        (other_experiment(tomorrow, "other"), True),
    ]
    assert [history.append(each) for each, _ in told] == [new for _, new in told]


def test_there_is_no_history_before_the_first_night(history):
    with pytest.raises(HistoryError, match="no history yet; `converge run` adds"):
        history.listing(Filter())
    assert not history.path.exists()


# ------------------------------------------------------------- several processes


def test_several_processes_append_at_once_to_a_file_that_none_has_made_yet(history):
    running = [appending(history, f"writer-{index}", 10) for index in range(5)]
    for each in running:
        each.communicate(timeout=300)
    assert [each.returncode for each in running] == [0] * 5
    assert count_of(history.path, "nights") == 50
    assert count_of(history.path, "measurements") == 50 * SETS * CHECKS
    for index in range(5):
        found = history.nights(f"writer-{index}", "set-0")
        assert [(night.finished - START).days for night in found] == list(range(10))


def test_a_file_that_another_process_makes_while_it_is_opened_is_a_history(history, monkeypatch):
    connect = sqlite3.connect

    class Interrupted(sqlite3.Connection):
        """Another process makes the file between the first two statements of this one."""

        executed = 0

        def execute(self, *arguments):
            self.executed += 1
            if self.executed == 2:
                with closing(connect(history.path, isolation_level=None)) as other:
                    migrate(other, APPLICATION)
            return super().execute(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", partial(connect, factory=Interrupted))
        assert history.append(night(0))
    assert count_of(history.path, "nights") == 1


def test_a_killed_process_leaves_whole_nights_and_loses_none_that_it_reported(history):
    told = 0
    for attempt in range(6):
        with appending(history, f"killed-{attempt}", 0) as process:
            for _ in range(attempt + 1):
                process.stdout.readline()
                told += 1
            # At once after a night: the next one is being written, somewhere in the middle.
            process.kill()
            told += len(process.stdout.readlines())
    nights = count_of(history.path, "nights")
    assert told <= nights <= told + 6
    assert count_of(history.path, "results") == nights * SETS
    assert count_of(history.path, "measurements") == nights * SETS * CHECKS
    with closing(sqlite3.connect(history.path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_night_that_cannot_be_written_whole_is_not_there_at_all(history):
    history.append(night(0))
    twice = night(1, result("tp2"), result("pp2"), result("tp2"))
    with pytest.raises(HistoryError, match="UNIQUE"):
        history.append(twice)
    assert [count_of(history.path, table) for table in ("nights", "results")] == [1, 1]


def test_a_full_disk_is_reported_and_keeps_earlier_nights(tmp_path):
    many = tuple(deviation(f"check {index}", 1e-7) for index in range(40_000))  # more than a cache
    with small_disk_at(tmp_path / "small disk", "1m") as disk:
        history = History(disk / "history.sqlite")
        history.append(night(0))
        with pytest.raises(HistoryError, match="database or disk is full"):
            history.append(night(1, result(measurements=many)))
        assert [entry.finished for entry in history.listing(Filter())] == [START]


@pytest.mark.parametrize(
    ("path", "mode"),
    [("/home/ada/x.sqlite", "WAL"), ("/shared/store/x.sqlite", "DELETE"), ("/scratch/x", "WAL")],
)
def test_a_log_that_needs_shared_memory_is_not_used_on_a_shared_file_system(path, mode):
    mounts = [Mount("/", "ext4"), Mount("/shared", "nfs4"), Mount("/scratch", "tmpfs")]
    assert journal_mode(Path(path), mounts) == mode


# --------------------------------------------------- other versions, and damage


def test_a_file_of_version_1_is_read_and_goes_on(tmp_path):
    path = tmp_path / "history.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((HERE / "version-1.sql").read_text())
    history = History(path)
    entries = history.listing(Filter())
    assert [(entry.test_set, entry.verdict) for entry in entries] == [
        *(("tp2", FAIL), ("pp2", Judgement.PASS), ("tp2", Judgement.PASS), ("pp2", Judgement.PASS))
    ]
    assert entries[0].previous is Judgement.PASS
    assert [series.check for series in history.series("nightly", "tp2")] == ["loss-envelope"]
    assert history.append(night(9, result("tp2")))
    assert len(history.nights("nightly", "tp2")) == 3


def test_a_migration_changes_a_file_once_and_keeps_what_is_in_it(history):
    history.append(night(0))
    grown = (*MIGRATIONS, ("ALTER TABLE nights ADD COLUMN note TEXT NOT NULL DEFAULT 'none'",))
    with closing(sqlite3.connect(history.path, isolation_level=None)) as connection:
        for _ in range(2):
            migrate(connection, 1, grown)
        assert connection.execute("SELECT experiment, note FROM nights").fetchall() == [
            ("nightly", "none")
        ]
        assert connection.execute("PRAGMA user_version").fetchone() == (len(grown),)


def test_a_migration_that_fails_leaves_the_file_as_it_was(history):
    history.append(night(0))
    wrong = (*MIGRATIONS, ("CREATE TABLE extra (id INTEGER)", "ALTER TABLE nothing ADD COLUMN x"))
    with closing(sqlite3.connect(history.path, isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError):
            migrate(connection, 1, wrong)
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        names = connection.execute("SELECT name FROM sqlite_schema WHERE name = 'extra'")
        assert names.fetchall() == []
    assert history.listing(Filter())


def test_a_file_of_a_newer_release_is_refused_and_left_alone(history):
    history.append(night(0))
    with closing(sqlite3.connect(history.path, isolation_level=None)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(HistoryError, match=r"version 99 by a newer converge.*upgrade converge"):
        history.append(night(1))
    assert count_of(history.path, "nights") == 1


def overwritten(path):
    History(path).append(night(0))
    content = bytearray(path.read_bytes())
    content[4096:] = b"\x5a" * (len(content) - 4096)  # all pages but the first
    path.write_bytes(content)


def foreign(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (id INTEGER)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no database, " * 1000), "damaged .*move it away"),
        (overwritten, "damaged .*move it away"),
        (foreign, "another program"),
        (lambda path: path.mkdir(), "give another --history FILE"),
    ],
    ids=["text", "overwritten", "foreign", "folder"],
)
def test_what_is_no_history_is_refused_in_words(history, make, message):
    make(history.path)
    with pytest.raises(HistoryError, match=message) as caught:
        history.append(night(1))
    assert str(history.path) in str(caught.value)


def test_a_history_in_a_folder_that_is_read_only_is_read(history, monkeypatch):
    history.append(night(0))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert len(history.listing(Filter())) == 1
    with pytest.raises(HistoryError, match=r"readonly.*give another --history FILE"):
        history.append(night(1))
    assert [each.name for each in history.path.parent.iterdir()] == [history.path.name]


def test_times_are_kept_in_utc(history):
    history.append(night(0))
    assert history.listing(Filter())[0].finished.tzinfo == UTC
