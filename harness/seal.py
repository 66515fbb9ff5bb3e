"""What a finished run leaves and what it was made of, as digests in its record.

A run is taken again by its identity, which is known before it starts. Its record holds what is only
known afterwards: the digest of every evidence file, so that evidence which somebody changed is not
judged; and of the files outside of the toolchain that its ranks imported or that its config names,
so that a run is not taken again once one of them is another.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from converge_harness.model import RunRecord
from converge_harness.run_folder.job import JobDocument, moved_with
from converge_harness.run_folder.layout import (
    EVIDENCE_SUFFIXES,
    IMPORTED,
    IN_FORCE,
    JOB,
    NO_EVIDENCE,
    WRITTEN_LATER,
)

_LARGEST = 1 << 30
"""Bytes of a folder of data beyond which it is not read through."""
_MOST = 10_000
"""The same of files."""


def evidence_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every evidence file of a run folder, by its path from there.

    That is all that ranks left but logs and checkpoints, and the curve of a program that is not
    probed.
    """
    return {name: _digest(path) for name, path in _evidence_files(folder)}


def broken_seal(folder: Path, evidence: Mapping[str, str]) -> str:
    """Which evidence of a run folder is not what the run left, in a clause; empty if all is."""
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
    """Why a finished run cannot be taken again, in a clause; empty when it can."""
    broken = "" if record.evidence is None else broken_seal(record.folder, record.evidence)
    return broken or changed_source(record.sources)


def sources_of(folder: Path) -> dict[str, str | None]:
    """Digest of what a run was made of besides its identity's facts, by path.

    Those are modules that its ranks imported from outside of the toolchain's packages, and files
    and folders that its config names. None where there is no digest, or where the file was written
    while the run trained: nothing then shows that what is there is what it was made of.
    """
    left = [json.loads(path.read_bytes()) for path in sorted((folder / IMPORTED).glob("*.json"))]
    found: dict[str, str | None] = {}
    for name, digest in (each for one in left for each in one["files"].items()):
        # A package that this machine does not have is that of a container's image, which the
        # identity names.
        if _in_packages(Path(name)) and not Path(name).exists():
            continue
        # Of ranks that do not agree, one imported another file.
        found[name] = digest if found.get(name, digest) == digest else None
    began = min((one.get("began", math.inf) for one in left), default=math.inf)
    for path in _named_by_config(folder):
        found[str(path)] = _digest_of_data(path, written_by=began)
    return found


def changed_source(sources: Mapping[str, str | None]) -> str:
    """Which of a run's sources is not what it was, in a clause; empty if all are."""
    for name, digest in sources.items():
        path = Path(name)
        if digest is None:
            return f"{name}, which it used, has no digest, or was written while it trained"
        if not path.exists():
            return f"{name}, which it used, is not there any more"
        if _digest_of_data(path) != digest:
            return f"{name}, which it used, has changed"
    return ""


def _evidence_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if inside.parts[0] in NO_EVIDENCE or inside.name in WRITTEN_LATER:
            continue
        if path.suffix in EVIDENCE_SUFFIXES and not inside.name.startswith(".") and path.is_file():
            yield inside.as_posix(), path
    curves = _curves(folder)
    if curves is not None:
        for path in sorted(curves.rglob("*")) if curves.is_dir() else [curves]:
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _curves(folder: Path) -> Path | None:
    """Where a program that is not probed left its curve; the folder may have been moved since.

    None for other runs, and for what lies outside of the folder, which is never read.
    """
    job = _job(folder)
    try:
        return moved_with(folder, job["command"]["curves"] or "", job["run_folder"])
    except (KeyError, TypeError, ValueError):
        return None


def _job(folder: Path) -> JobDocument:
    try:
        value: JobDocument = json.loads(_content(folder / JOB))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _named_by_config(folder: Path) -> Iterator[Path]:
    """Files and folders that the config in force names; relative paths are the run folder's."""
    try:
        config = json.loads(_content(folder / IN_FORCE))["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    job = _job(folder)
    # The identity holds the digests of our corpus and of the seed checkpoint.
    data: Mapping[str, Any] = job.get("data") or {}
    given = (data.get("folder"), job.get("seed_checkpoint"))
    run = folder.resolve()
    covered = [run, *(Path(each).resolve() for each in given if each)]
    seen = set()
    for value in _texts(config):
        if "/" not in value:
            continue
        path = (folder / value).resolve()
        # What holds the run itself is where results go.
        known = any(path.is_relative_to(each) for each in covered) or run.is_relative_to(path)
        if path not in seen and not known and path.exists():
            seen.add(path)
            yield path


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON value, however deep; keys are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _content(path: Path) -> bytes:
    """Raises OSError, also for what is no file: a pipe would be waited for, for ever."""
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_bytes()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _in_packages(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _digest_of_data(path: Path, *, written_by: float = math.inf) -> str | None:
    """Of a file, or of all files of a folder by name.

    None for what is too large, unreadable, or written after a time (seconds since the epoch).
    Empty files have no content that could have been another: libraries make locks of them.
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
    """Files in a folder and in those that it links to, each folder once."""
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        here = os.path.realpath(place)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        yield from (file for name in names if (file := Path(place) / name).is_file())
