"""Digests of a finished run's evidence and sources, kept in its record.

Whether a run can be reused is decided by its identity, which is known before it starts. Its record
adds what is known only afterwards: the digest of every evidence file, so that evidence that was
changed later is not judged; and the digests of files outside of the toolchain that its ranks
imported or that its config names, so that a run is not reused once one of them has changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from converge_harness.errors import ConvergeError
from converge_harness.model import RunRecord
from converge_harness.run_folder.imported import read_imported
from converge_harness.run_folder.in_force import InForceDocument
from converge_harness.run_folder.job import JobDocument, JobError, read_document
from converge_harness.run_folder.layout import (
    EVIDENCE_SUFFIXES,
    IN_FORCE,
    JOB,
    NO_EVIDENCE,
    WRITTEN_LATER,
    is_inside,
)
from converge_harness.run_folder.shapes import texts_in
from converge_harness.run_folder.starts import read_start, start_files
from converge_harness.trainers import trainer_of_document

_LARGEST = 1 << 30
"""Bytes: a larger folder of data gets no digest."""
_MOST = 10_000
"""Files: a folder with more gets no digest."""


def evidence_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every evidence file of a run folder, by its path from there.

    Evidence is everything that the ranks wrote except logs and checkpoints, and the curve file of a
    run without the probe.
    """
    return {name: _digest(path) for name, path in _evidence_files(folder)}


def broken_seal(folder: Path, evidence: Mapping[str, str]) -> str:
    """A clause that names an evidence file changed since the run finished; empty if none was."""
    there = dict(_evidence_files(folder))
    for name, digest in evidence.items():
        if name not in there:
            return f"{name} was removed after the run had finished"
        try:
            if _digest(there[name]) != digest:
                return f"{name} was changed after the run had finished"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
    added = sorted(there.keys() - evidence.keys())
    return f"{added[0]} was added after the run had finished" if added else ""


def stale(record: RunRecord) -> str:
    """Why a finished run cannot be reused, in a clause; empty when it can."""
    broken = "" if record.evidence is None else broken_seal(record.folder, record.evidence)
    return broken or changed_source(record.sources)


def sources_of(folder: Path) -> dict[str, str | None]:
    """Digests of a run's sources that its identity does not cover, by path.

    These are the modules that its ranks imported from outside of the toolchain's packages, and the
    files and folders that its config names. None where there is no digest, or where the file was
    written while the run trained: then it may not be the file that the run used.
    """
    left = read_imported(folder)
    found: dict[str, str | None] = {}
    for name, digest in (each for one in left for each in one["files"].items()):
        # A package that does not exist on this machine is part of the container image, which the
        # identity names.
        if _in_packages(Path(name)) and not Path(name).exists():
            continue
        # Ranks whose digests differ imported different files.
        found[name] = digest if found.get(name, digest) == digest else None
    began = min((one.get("began", math.inf) for one in left), default=math.inf)
    for path in _named_by_config(folder):
        found[str(path)] = _digest_of_data(path, written_by=began)
    return found


def changed_source(sources: Mapping[str, str | None]) -> str:
    """A clause that names a source that has changed since the run; empty if none has."""
    for name, digest in sources.items():
        path = Path(name)
        if digest is None:
            return f"{name}, which it used, has no digest, or was written while it trained"
        if not path.exists():
            return f"{name}, which it used, is not there any more"
        if _digest_of_data(path) != digest:
            return f"{name}, which it used, has changed"
    return ""


def other_code(code: Mapping[str, str], sources: Mapping[str, str | None]) -> str:
    """A clause that says that ranks imported another package than they were to; empty if not.

    Args:
        code: SHA-256 of the files of the package, by ``torchtitan/trainer.py``; empty: any.
        sources: digests of what ranks imported from outside of their toolchain's packages, by path.
    """
    if not code:
        return ""
    package = next(iter(code)).partition("/")[0]
    places = {path: _inside(path, package, code) for path in sources}
    known = {path: name for path, name in places.items() if name}
    first = f"{package}/__init__.py"
    roots = {path.removesuffix(first) for path, name in known.items() if name == first}
    if len(roots) != 1:
        found = f"from {' and '.join(sorted(roots))}" if roots else "from the toolchain's packages"
        return f"its ranks imported {package} {found}, and not the code that the run was planned by"
    (root,) = roots
    for path, digest in sources.items():
        if not path.startswith(f"{root}{package}/"):
            continue
        if digest is None:
            return f"{path}, which its ranks imported, was written while it trained"
        if code.get(known.get(path, "")) != digest:
            return f"{path}, which its ranks imported, is not what it was when the run was planned"
    return ""


def _inside(path: str, package: str, names: Mapping[str, str]) -> str:
    """The name of a file of a package by its path; empty for another file."""
    place = -1
    while (place := path.find(f"/{package}/", place + 1)) >= 0:
        if path[place + 1 :] in names:
            return path[place + 1 :]
    return ""


def _evidence_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if inside.parts[0] in NO_EVIDENCE or inside.name in WRITTEN_LATER:
            continue
        if path.suffix in EVIDENCE_SUFFIXES and not inside.name.startswith(".") and path.is_file():
            yield inside.as_posix(), path
    for curves in _curves(folder):
        for path in sorted(curves.rglob("*")) if curves.is_dir() else [curves]:
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _curves(folder: Path) -> list[Path]:
    """The curve file of a run without the probe, or those of its starts.

    The run folder may have been moved since. Empty for other runs, and without files outside of the
    folder, which are never read.
    """
    job = _job(folder)
    try:
        curve = trainer_of_document(job).curve_of(folder, job) if job else None
        starts = [folder / read_start(path)["curve"] for path in start_files(folder).values()]
    except (ConvergeError, OSError, KeyError, TypeError, ValueError):
        return []
    found = starts or ([curve.path] if curve else [])
    return [path for path in found if is_inside(path, folder)]


def _job(folder: Path) -> JobDocument:
    """``job.json``; empty if it cannot be read, which whoever reads the evidence reports."""
    path = folder / JOB
    try:
        return read_document(path) if path.is_file() else {}
    except JobError:
        return {}


def _named_by_config(folder: Path) -> Iterator[Path]:
    """Files and folders that the config in force names; relative paths start at the run folder."""
    try:
        config = cast("InForceDocument", json.loads(_content(folder / IN_FORCE)))["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    job = _job(folder)
    # The identity already covers our corpus and the seed checkpoint.
    data: Mapping[str, Any] = job.get("data") or {}
    given = (data.get("folder"), job.get("seed_checkpoint"))
    run = folder.resolve()
    covered = [run, *(Path(each).resolve() for each in given if each)]
    seen = set()
    for value in texts_in(config):
        if "/" not in value:
            continue
        path = (folder / value).resolve()
        # A folder that contains the run folder is an output folder, not a source.
        known = any(path.is_relative_to(each) for each in covered) or run.is_relative_to(path)
        if path not in seen and not known and path.exists():
            seen.add(path)
            yield path


def _content(path: Path) -> bytes:
    """Raises OSError, also if the path is not a regular file: reading a pipe may block forever."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_bytes()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _in_packages(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _digest_of_data(path: Path, *, written_by: float = math.inf) -> str | None:
    """Digest of a file, or of all files of a folder with their names.

    None if it is too large, unreadable, or was written after ``written_by`` (seconds since the
    epoch). That does not apply to empty files, which libraries use as locks.
    """
    try:
        if path.is_file():
            return None if path.stat().st_ctime > written_by else _digest(path)
        files = []
        size = 0
        for each in _files_below(path):
            files.append(each)
            found = each.stat()
            size += found.st_size
            too_late = found.st_size and found.st_ctime > written_by
            if len(files) > _MOST or size > _LARGEST or too_late:
                return None
        whole = hashlib.sha256()
        for each in sorted(files):
            whole.update(f"{each.relative_to(path).as_posix()}\0{_digest(each)}\0".encode())
        return whole.hexdigest()
    except OSError:
        return None


def _files_below(folder: Path) -> Iterator[Path]:
    """Files below a folder, symbolic links followed, each folder once."""
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        yield from (file for name in names if (file := Path(place) / name).is_file())
