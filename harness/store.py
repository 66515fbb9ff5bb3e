"""Writes converge's own files and takes its locks; ranks write theirs by ``run_folder/``.

Everything is written to a temporary sibling first and moved into place. A reader never sees half a
file, and a failed write (read-only folder, full disk, kill) keeps the old content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from converge_harness.errors import StoreError
from converge_harness.model import RankError, RunRecord, RunStatus
from converge_harness.run_folder import documents
from converge_harness.run_folder.documents import (
    SCHEMA,
    number,
    spell_not_finite,
    unique_keys,
)
from converge_harness.run_folder.layout import (
    CHECKPOINTS,
    COMPILED,
    ENDED,
    JOB,
    PASSES,
    RECORD,
    STARTED,
    TORN,
    WAIT,
    seed_checkpoint_of,
)
from converge_harness.run_folder.records import RecordDocument, RunFacts
from converge_harness.seal import changed_source, evidence_of, sources_of, stale

DEFAULT_ROOT = Path(".converge")
ROOT_VARIABLE = "CONVERGE_STORE"
_IDENTITY_DIGITS = 12
_SLUG_LENGTH = 40
_FOLDER_DIGITS = 8


def default_root(environment: Mapping[str, str]) -> Path:
    """``$CONVERGE_STORE``, else ``.converge`` in the working directory."""
    return Path(environment.get(ROOT_VARIABLE) or DEFAULT_ROOT)


def folder_key(identity: str) -> str:
    """The suffix of the name of an identity's run folder."""
    return identity[:_IDENTITY_DIGITS]


def slug(name: str) -> str:
    """A short readable ASCII folder name; only the identity makes it unique."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_.]+", "-", plain).strip("-.")[:_SLUG_LENGTH] or "run"


def folder_name(*names: str) -> str:
    """A unique folder name, for folders without an identity.

    For one short ASCII name it is its ``slug``, otherwise the slug and eight digits of a hash.
    """
    text = slug("-".join(names))
    if len(names) == 1 and names[0].isascii() and len(names[0]) <= _SLUG_LENGTH:
        return text
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text}-{digest[:_FOLDER_DIGITS]}"


# --------------------------------------------------------------------- files


def atomic_write(path: Path, content: bytes) -> None:
    """Replace a file's content atomically; make its folder if missing.

    Raises StoreError when the folder cannot be written or the disk is full; then the old content is
    kept and no temporary file is left.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            # mkstemp makes files that only their owner may read; others should be able to read
            # reports.
            os.fchmod(descriptor, 0o644)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        raise StoreError(_explain("write", path, error)) from error


def require_writable(folder: Path) -> None:
    """Raise StoreError when no file can be written into a folder, which is made if missing."""
    probe = folder / ".writable"
    atomic_write(probe, b"converge\n")
    probe.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with its schema version; NaN and infinities become strings.

    Raises StoreError as ``atomic_write`` does.
    """
    atomic_write(path, as_bytes(value))


def as_bytes(value: Mapping[str, Any]) -> bytes:
    """What ``write_json`` writes."""
    document = {"schema": SCHEMA, **spell_not_finite(dict(value))}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that ``write_json`` wrote; NaN and infinities stay strings (see ``number``).

    Raises StoreError when the file is missing, is not a JSON object, or has a newer schema.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe could block forever
            raise StoreError(f"{path}: is not a file; delete it and it will be made again")
        value = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except OSError as error:
        raise StoreError(_explain("read", path, error)) from error
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{path}: not JSON ({error}); delete it and it will be made again"
        ) from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return upgraded(path, path.name, value)


def upgraded(path: Path, name: str, value: dict[str, Any]) -> dict[str, Any]:
    """What a file holds, in the current schema; ``name`` is the file's in ``UPGRADES``.

    Raises StoreError unless this converge can read files of its schema.
    """
    try:
        return documents.upgraded(name, value)
    except documents.SchemaError as error:
        raise StoreError(f"{path}: {error}") from error


def _explain(verb: str, path: Path, error: OSError) -> str:
    """What an OSError means to a user, and what to do about it."""
    remedy = {
        errno.ENOSPC: "the disk is full: free some space, or give another folder",
        errno.EACCES: "no permission: give a folder that you can write to",
    }.get(error.errno or 0, f"{error.strerror or error}: give another folder")
    return f"{path}: cannot {verb}: {remedy}"


# --------------------------------------------------------------------- store


@dataclass(frozen=True, slots=True)
class Store:
    """The folders of one store root (``docs/architecture.md`` draws them)."""

    root: Path

    def run_folder(
        self, name: str, identity: str, folders: Mapping[str, Path] | None = None
    ) -> Path:
        """A job's folder: the existing one of that identity, else the path of a new one.

        ``folders`` is the result of ``run_folders``, which scans the disk once for many jobs.
        """
        there = self._existing(identity) if folders is None else folders.get(folder_key(identity))
        return there or self.root / "runs" / f"{slug(name)}-{folder_key(identity)}"

    def run_folders(self) -> dict[str, Path]:
        """All run folders by the first digits of their identity (``folder_key``), in one scan."""
        try:
            names = sorted(entry.name for entry in os.scandir(self.root / "runs"))
        except OSError:  # no store yet
            return {}
        found: dict[str, Path] = {}
        for name in names:
            if not name.startswith("."):
                found.setdefault(name.rpartition("-")[2], self.root / "runs" / name)
        return found

    def calibration_file(self, identity: str) -> Path:
        """File with the limits learnt from that control's repeats (``harness/calibrations.py``)."""
        return self.root / "calibrations" / f"{identity}.json"

    def checked_file(self, identity: str) -> Path:
        """A file that exists once the toolchain has found the job's config valid."""
        return self.root / "checked" / f"{identity}.json"

    def record(self, identity: str) -> RunRecord | None:
        """The stored record of that identity; None if there is no finished run.

        Raises StoreError if the record is damaged or has a newer schema.
        """
        folder = self._existing(identity)
        if folder is None or not (folder / RECORD).is_file():
            return None
        record = read_record(folder)
        return record if record.identity == identity else None

    def finish_run(self, record: RunRecord, facts: RunFacts) -> RunRecord:
        """Clean up, then write ``record.json`` last; return the record as written.

        Removed are compiled kernels and, if the run has finished, its checkpoints, except for a
        seed checkpoint. ``facts`` are written beside the record. Raises StoreError as
        ``atomic_write`` does.
        """
        done_with = [COMPILED]
        resumed = (record.folder / PASSES).is_dir()
        is_seed = not resumed and seed_checkpoint_of(record.folder).exists()
        if record.status is RunStatus.FINISHED and not is_seed:
            done_with += [CHECKPOINTS, TORN]
        for name in done_with:
            shutil.rmtree(record.folder / name, ignore_errors=True)
        (record.folder / WAIT).unlink(missing_ok=True)  # its call, repeated by hand, must not wait
        sealed = replace(
            record, evidence=evidence_of(record.folder), sources=sources_of(record.folder)
        )
        write_json(record.folder / RECORD, _document(sealed, facts))
        return sealed

    def start_run(self, folder: Path, job: Mapping[str, Any]) -> None:
        """Make a run folder with ``job.json`` and nothing from an earlier attempt.

        Raises StoreError when it cannot be cleaned or written.
        """
        try:
            if folder.exists():
                # The record is removed first, so that an interrupted cleanup leaves an unfinished
                # run.
                (folder / RECORD).unlink(missing_ok=True)
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        except OSError as error:
            raise StoreError(_explain("clean", folder, error)) from error
        write_json(folder / JOB, job)

    def can_continue(self, folder: Path, job: Mapping[str, Any]) -> bool:
        """Whether a run folder is that of this job, and nothing it was made from has changed.

        Also False for a folder that is not there or is damaged.
        """
        try:
            if (folder / JOB).read_bytes() != as_bytes(job):
                return False
            if (folder / RECORD).is_file():
                return not stale(read_record(folder))
            return not changed_source(sources_of(folder))
        except (StoreError, OSError, ValueError, KeyError, TypeError):
            return False

    def continue_run(self, folder: Path) -> None:
        """Make the folder of an earlier run ready to continue: remove only what says that it ended.

        Raises StoreError when it cannot be written.
        """
        try:
            for name in (RECORD, ENDED, WAIT):
                (folder / name).unlink(missing_ok=True)
            if (folder / STARTED).is_dir():
                shutil.rmtree(folder / STARTED)
        except OSError as error:
            raise StoreError(_explain("clean", folder, error)) from error

    def lock(self, identity: str) -> RunLock:
        """The lock that converge holds while it runs the job of that identity."""
        return RunLock(self.root / "locks" / f"{identity}.lock")

    def wanted(self, identity: str) -> RunLock:
        """The lock that a process holds while it waits for another one that runs the same job."""
        return RunLock(self.root / "locks" / f"{identity}.wanted.lock")

    def require_writable(self) -> None:
        """Raise StoreError if the store cannot be written; called before anything is launched."""
        require_writable(self.root)

    def _existing(self, identity: str) -> Path | None:
        suffix = f"-{folder_key(identity)}"
        try:
            found = [
                entry.path
                for entry in os.scandir(self.root / "runs")
                if entry.name.endswith(suffix) and not entry.name.startswith(".")
            ]
        except OSError:  # no store yet; if something else is wrong, writing will say so
            return None
        return Path(min(found)) if found else None


@dataclass(slots=True)
class RunLock:
    """An advisory lock on one identity; the kernel frees it when its holder dies."""

    path: Path
    _held: FileLock | None = None

    def acquire(self) -> bool:
        """Take the lock if nobody holds it.

        Raises StoreError when the lock file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path)
            lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            raise StoreError(_explain("lock", self.path, error)) from error
        self._held = lock
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def is_free(self) -> bool:
        """Whether nobody holds it, this process included. Raises StoreError as ``acquire``."""
        free = self.acquire()
        self.release()
        return free


def _digests(value: object) -> Mapping[str, Any] | None:
    """Check that a value is None or digests by path; raises TypeError otherwise."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(
        each is None or isinstance(each, str) for each in value.values()
    ):
        raise TypeError(f"digests by path are {value!r}")
    return value


def _document(record: RunRecord, facts: RunFacts) -> RecordDocument:
    error = record.error
    return {
        "name": record.name,
        "identity": record.identity,
        "folder": record.folder.name,
        "status": record.status.value,
        "wall_s": record.wall_s,
        "argv": list(record.argv),
        "error": {"rank": error.rank, "message": error.message, "traceback": error.traceback}
        if error
        else None,
        "requeues": record.requeues,
        "evidence": None if record.evidence is None else dict(record.evidence),
        "sources": dict(record.sources),
        "reused": False,
        **facts,
    }


def read_record(folder: Path) -> RunRecord:
    """Read a run folder's record; the folder may have been moved.

    Raises StoreError if the record is damaged or has a newer schema.
    """
    path = folder / RECORD
    value = cast("RecordDocument", read_json(path))
    try:
        error = value["error"]
        return RunRecord(
            name=value["name"],
            identity=value["identity"],
            folder=folder,
            status=RunStatus(value["status"]),
            wall_s=number(value["wall_s"]) or 0.0,
            argv=tuple(value["argv"]),
            error=RankError(**error) if error else None,
            requeues=int(value.get("requeues", 0)),
            evidence=_digests(value.get("evidence")),
            sources=_digests(value.get("sources")) or {},
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise StoreError(
            f"{path}: incomplete record ({problem!r}); delete the folder to run the job again"
        ) from problem
