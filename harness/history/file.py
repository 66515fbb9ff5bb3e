"""Opens a history file for several processes at once, and says in words what is wrong with it."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from harness.errors import HistoryError
from harness.history.schema import migrate

PATIENCE_S = 60.0
"""How long one process waits for the transactions of others, which take milliseconds."""
APPLICATION = 0x436F6E76
"""``PRAGMA application_id`` of our files: "Conv"."""
_SHARED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse.")
"""How the types of file systems begin that several machines may mount."""


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    type: str


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A history file in autocommit mode, made or brought to today's version if need be.

    A file that may not be written is only read.

    Raises:
        HistoryError: for every error of the file, here and in the block.
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
    """All of the block or nothing of it, with no other writer in between."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # on a full disk SQLite has rolled back itself
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def journal_mode(path: Path, mounts: Iterable[Mount]) -> str:
    """``WAL``, or ``DELETE`` on a file system that other machines may mount too.

    Readers and one writer of a write-ahead log share memory, so all of them must be on one machine
    (https://www.sqlite.org/wal.html, "WAL does not work over a network filesystem").
    """
    parents = {str(parent) for parent in path.absolute().parents}
    holding = [mount for mount in mounts if mount.point in parents]
    nearest = max(holding, key=lambda mount: len(mount.point), default=Mount("/", ""))
    return "DELETE" if nearest.type.startswith(_SHARED) else "WAL"


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    # Nothing can lie beside a file in a folder that is read-only, not even what readers share.
    mode = "?mode=ro&immutable=1" if read_only else ""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}{mode}", uri=True, timeout=PATIENCE_S, isolation_level=None
    )
    connection.row_factory = sqlite3.Row
    return connection


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if application != APPLICATION and (application or tables):
        raise HistoryError("a database of another program; give another --history FILE")


def _set_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Choose how transactions are kept; SQLite does not wait by itself for this."""
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
