"""Which files a rank's code came from, besides what the identity of its job covers.

A job's identity holds the versions of the toolchain's packages and the digest of our own rank code.
Modules that lie elsewhere (an editable install, a folder on ``PYTHONPATH``, the person's own script
or override) change without either. So each rank leaves their digests in
``imported/rank-NNNNN.json``, and a finished run is taken again only while they are the same.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import harness
from harness.rank.writer import write_json

FOLDER = "imported"
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Folders of modules that the run itself generates."""


def leave_imported(run_folder: Path, rank: int) -> None:
    """Write ``imported/rank-NNNNN.json``: ``{"schema": 1, "files": {path: SHA-256 or null}}``.

    Null stands for what cannot be read as a file, as a module in a zip archive.
    """
    covered = _covered(run_folder)
    files = {str(path): _digest(path) for path in _files() if not _is_covered(path, covered)}
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    write_json(folder / f"rank-{rank:05d}.json", {"files": dict(sorted(files.items()))})


def _files() -> Iterator[Path]:
    for module in list(sys.modules.values()):
        # Some modules answer any attribute, and some raise.
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str) and name:
            yield Path(os.path.realpath(name))


def _covered(run_folder: Path) -> tuple[Path, ...]:
    """Folders of the interpreter, of ours, and of what the run itself makes."""
    of_python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    caches = (os.environ.get(name) for name in _CACHES)
    folders = (*of_python, *caches, *harness.__path__, run_folder)
    return tuple(Path(os.path.realpath(each)) for each in folders if each)


def _is_covered(path: Path, covered: tuple[Path, ...]) -> bool:
    return not _PACKAGES.isdisjoint(path.parts) or any(
        path.is_relative_to(each) for each in covered
    )


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
