"""A Python named by its path: asked what it would import. Nothing of that is imported here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from converge_harness.errors import ToolchainError

_QUESTION = """\
import importlib.util, json, platform, site, sys, sysconfig
sys.path[:] = [path for path in sys.path if path]
def place(name):
    try:
        found = importlib.util.find_spec(name)
    except Exception:  # find_spec imports the parents of a name, whose code may raise anything
        return None
    if found is None:
        return None
    return next(iter(found.submodule_search_locations or [found.origin]), None)
print()
print(json.dumps({
    "executable": sys.executable,
    "release": platform.python_version(),
    "paths": sys.path,
    "base": site.getsitepackages([sys.base_prefix]) if sys.prefix != sys.base_prefix else [],
    "standard": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "places": {name: place(name) for name in sys.argv[1:]},
}))
"""
THIS_PACKAGE = __name__.partition(".")[0]
_OWN_FOLDER = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 60.0
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_NO_SOURCE = (".pyc", ".pyo")


@dataclass(frozen=True, slots=True)
class PythonAnswer:
    """What a Python says of itself."""

    python: Path
    """The real executable, in case a shim (pyenv) was called."""
    release: str
    paths: tuple[str, ...]
    """Its module search path."""
    base: tuple[str, ...]
    """Packages' folders of the Python that a virtual environment was made from."""
    standard: tuple[str, ...]
    """Folders of its standard library."""
    places: Mapping[str, Path | None]
    """By name of a module: its folder, or its file; None for one that it would not find."""

    @property
    def sources(self) -> tuple[Path, ...]:
        """Folders of its search path that are no packages' folders: editable installs."""
        return tuple(
            path
            for path in map(Path, self.paths)
            if path.is_dir()
            and _PACKAGES.isdisjoint(path.parts)
            and not any(path.is_relative_to(each) for each in self.standard)
        )


def ask(python: Path, modules: Sequence[str] = (), first: Sequence[Path] = ()) -> PythonAnswer:
    """Ask a Python for its module paths: system Pythons and conda have different layouts.

    ``modules`` are those whose place it is asked for, ``first`` folders that it searches first.
    Raises ToolchainError if it does not start.
    """
    variables = dict(os.environ)
    if first:
        variables["PYTHONPATH"] = before(first, variables.get("PYTHONPATH"))
    try:
        asked = subprocess.run(
            [python, "-c", _QUESTION, *modules],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            env=variables,
        )
        # What a .pth file prints comes before.
        described = json.loads(asked.stdout.rpartition("\n{")[2].join(("{", "")))
        places = {
            name: Path(place) if place else None for name, place in described["places"].items()
        }
        paths, base, standard = (
            tuple(map(str, described[name])) for name in ("paths", "base", "standard")
        )
        executable, release = described["executable"], str(described["release"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        if isinstance(error, ValueError | KeyError | TypeError):
            said = "it ends without an answer"
        else:
            said = getattr(error, "stderr", None) or getattr(error, "strerror", None) or str(error)
        raise ToolchainError(
            f"{python} does not start as a Python: {str(said).strip().rpartition(chr(10))[2]}; "
            "name another by trainer.python or trainer.toolchain"
        ) from None
    return PythonAnswer(Path(executable or python), release, paths, base, standard, places)


def before(first: Sequence[Path], then: str | None) -> str:
    """A ``PYTHONPATH`` with folders before what is there already."""
    return os.pathsep.join((*map(str, first), *filter(None, [then])))


def places_of(answer: PythonAnswer, package: str) -> tuple[Path, ...]:
    """All locations of a package on a Python's ``sys.path``, in import order.

    A virtual environment is made to hide packages of the Python that it was made from: those do
    not count.
    """
    found = answer.places.get(package)
    base = {os.path.realpath(each) for each in answer.base}
    own = [Path(each, package) for each in answer.paths if os.path.realpath(each) not in base]
    all_of_them = (*([found] if found else []), *(each for each in own if _is_package(each)))
    return tuple(dict.fromkeys(Path(os.path.realpath(each)) for each in all_of_them))


def digests_of(package: Path) -> dict[str, str]:
    """SHA-256 of every file of a package but what Python caches, by ``package/file.py``."""
    return {
        path.relative_to(package.parent).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(_files(package))
    }


def digest_of(code: Mapping[str, str]) -> str:
    """One digest for the files of a package, short enough to be read."""
    described = "".join(f"{name}\0{digest}\n" for name, digest in sorted(code.items()))
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def has_this_package(answer: PythonAnswer) -> bool:
    """Whether a Python would import this very package, which rank code is a part of."""
    place = answer.places.get(THIS_PACKAGE)
    return place is not None and place.resolve() == _OWN_FOLDER


def folder_of_this_package() -> Path:
    """A folder with a link to this package and nothing else, for the search path of any Python.

    The folder that this package is installed in has packages that would hide those of that Python.
    """
    digest = hashlib.sha256(os.fsencode(_OWN_FOLDER)).hexdigest()[:12]
    folder = cache_folder() / "rank-code" / digest
    link = folder / THIS_PACKAGE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(_OWN_FOLDER, target_is_directory=True)
    except OSError as error:
        raise ToolchainError(
            f"{folder}, through which ranks import converge, cannot be written: {error.strerror}"
        ) from None
    return folder


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/converge``, by default ``~/.cache/converge``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "converge"


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def _files(package: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__" and name[0] != "."]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.suffix not in _NO_SOURCE and path.is_file():
                yield path
