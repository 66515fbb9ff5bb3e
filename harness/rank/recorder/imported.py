"""Files that a rank imported and that its job's identity does not cover.

A job's identity has the versions of the toolchain's packages and the digest of our own rank code.
Other modules (an editable install, a folder on ``PYTHONPATH``, the user's own script or override)
can change without changing it, and so can a package installed from a folder or a wheel, whose
version stays the same. So each rank writes their digests to ``imported/rank-NNNNN.json``, and a
finished run is reused only while they are the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import site
import sys
import sysconfig
import time
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType

import converge_harness
from converge_harness.run_folder.imported import write_imported

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Folders of modules that the run itself generates."""
_OWN = "converge-harness"
"""Our own distribution, whose code is part of the identity."""
_BEFORE_IMPORTS_S = 0.1
"""Seconds in which a process cannot yet have imported a user's module; also covers coarse
clocks."""


def process_began() -> float:
    """When this process started or was forked, in seconds since the epoch.

    By proc(5), field 22 of ``/proc/self/stat``; without it (macOS) the time of the call.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


_IMPORTS_BEGAN = process_began()
"""In a rank forked from a warm server: the start of the server, which did the imports."""


def leave_imported(run_folder: Path, rank: int) -> None:
    """Write ``imported/rank-NNNNN.json``."""
    covered = _generated(run_folder)
    paths = (path for path in _unidentified().values() if not _is_inside(path, covered))
    _, records = _packages()
    files = {str(path): _digest(path) for path in (*paths, *records)}
    write_imported(
        run_folder, rank, {"began": process_began(), "files": dict(sorted(files.items()))}
    )


def resolve_imported() -> None:
    """Find out now what ``leave_imported`` asks of the modules so far: forks of this process know.

    There are thousands, and a path is resolved by reading each part of it from the disk.
    """
    unidentified = _unidentified()
    for module in list(sys.modules.values()):
        if id(module) not in unidentified and _name(module):
            _IDENTIFIED[id(module)] = module


_IDENTIFIED: dict[int, ModuleType] = {}
"""By ``id``, modules that the job's identity covers; kept, so that no other gets their ``id``.

A fork does not ask them for their files again: that copies the memory of thousands of modules, and
nobody reloads a module of the toolchain from elsewhere.
"""


def _unidentified() -> dict[int, Path]:
    """The files of imported modules that the job's identity does not cover, by the module's id."""
    owned, _ = _packages()
    interpreter = _interpreter()
    found = {}
    for module in list(sys.modules.values()):
        if id(module) in _IDENTIFIED or not (name := _name(module)):
            continue
        path = _resolved(name)
        if str(path) not in owned and not _is_inside(path, interpreter):
            found[id(module)] = path
    return found


def _name(module: ModuleType) -> str:
    """The name of its file; empty if it has none."""
    # Some modules have any attribute, and some raise.
    name = getattr(module, "__dict__", {}).get("__file__")
    return name if isinstance(name, str) else ""


@functools.cache
def _resolved(name: str) -> Path:
    folder, file = os.path.split(name)
    path = Path(_resolved_folder(folder), file)
    return path.resolve() if path.is_symlink() else path


_resolved_folder = functools.cache(os.path.realpath)


@functools.cache
def _interpreter() -> tuple[Path, ...]:
    """Folders of the interpreter and of our package."""
    of_python = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return _real(*of_python, *converge_harness.__path__)


def _generated(run_folder: Path) -> tuple[Path, ...]:
    """Folders of modules that the run itself generates."""
    return _real(*(os.environ.get(name) for name in _CACHES), str(run_folder))


def _real(*folders: str | None) -> tuple[Path, ...]:
    return tuple(Path(os.path.realpath(each)) for each in folders if each)


def _is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    # On Debian the packages' folder is inside that of the standard library.
    packages = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return any(path.is_relative_to(each) for each in folders) and not packages


@functools.cache
def _packages() -> tuple[frozenset[str], tuple[Path, ...]]:
    """Files of this Python's packages, and ``RECORD`` of those that a version does not identify.

    A package from an index or a commit is identified by it. One from a folder or a file (PEP 610)
    is identified by its ``RECORD``, which has the digest of each file. Files that were copied by
    hand belong to no package.
    """
    owned: set[str] = set()
    records = []
    for distribution in distributions(path=_package_folders()):
        listed = distribution.read_text("RECORD") or ""
        base = os.path.realpath(str(distribution.locate_file("")))
        names = [line.split(",", 1)[0] for line in listed.splitlines()]
        owned.update(f"{base}/{name}" for name in names)
        if _is_local(distribution):
            records += [Path(base, name) for name in names if name.endswith(".dist-info/RECORD")]
    return frozenset(owned), tuple(records)


def _package_folders() -> list[str]:
    """The folders of this Python's own packages, without ``PYTHONPATH``."""
    folders = [*site.getsitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folders))


def _is_local(distribution: Distribution) -> bool:
    """Whether a package was installed from a folder or file, and is not editable."""
    text = distribution.read_text("direct_url.json")
    if text is None or distribution.metadata["Name"] == _OWN:
        return False
    try:
        origin = json.loads(text)
        return "vcs_info" not in origin and not origin.get("dir_info", {}).get("editable", False)
    except (ValueError, AttributeError):
        return True


def _digest(path: Path) -> str | None:
    try:
        # ctime: mtime can be set, and moving a file keeps it.
        if path.stat().st_ctime > _IMPORTS_BEGAN + _BEFORE_IMPORTS_S:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
