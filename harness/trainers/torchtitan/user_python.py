"""A Python that has a torchtitan of the user's own, often a fork that is installed editable.

Its name or version does not show what it is, so the Python is asked what it would import, and the
source is read. If the version does not identify the source, the source's digest is part of the
identity, so that an edited source means a new run.
"""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from converge_harness.checkout import checkout_of, described
from converge_harness.errors import ToolchainError
from converge_harness.model import CHECKOUT, Toolchain
from converge_harness.toolchains.find import (
    DISTRIBUTIONS,
    PACKAGES,
    all_packages,
    is_local,
    marked,
    versions,
)
from converge_harness.toolchains.user_python import (
    THIS_PACKAGE,
    PythonAnswer,
    ask,
    digest_of,
    digests_of,
    folder_of_this_package,
    has_this_package,
    places_of,
)
from converge_harness.trainers.torchtitan.dialect import dialect_of

TORCHTITAN = "torchtitan"
_NEEDED = {
    "torch": "install it there: https://pytorch.org/get-started",
    TORCHTITAN: "install your fork there: {python} -m pip install -e FORK",
    "numpy": "which converge's rank code needs: {python} -m pip install numpy",
}
_OLDEST = (3, 11)


def toolchain_of_python(name: str, first: tuple[Path, ...] = ()) -> Toolchain:
    """The toolchain of a Python by its path; ``first`` are folders that it searches first.

    Raises ToolchainError if it is no Python, lacks what ranks need, has two torchtitans, or one
    that no dialect can drive.
    """
    python = Path(name)
    answer = ask(python, (*_NEEDED, THIS_PACKAGE), first)
    package = _package(python, answer, chosen=bool(first))
    if first and not any(package.is_relative_to(each.resolve()) for each in first):
        raise ToolchainError(
            f"{python} imports torchtitan from {package}, even with {first[0]} before it on "
            "PYTHONPATH: install it with --config-settings editable_mode=compat, without an "
            "import hook"
        )
    paths = list(answer.paths)
    found = {
        "python": answer.release,
        **versions(paths, DISTRIBUTIONS),
        PACKAGES: all_packages(paths),
    }
    code: dict[str, str] = {}
    if _is_identified(package):
        found |= versions([str(package.parent)], [TORCHTITAN])
    else:
        code = digests_of(package)
        found[TORCHTITAN] = marked(found.get(TORCHTITAN, "0.0.0"), f"tree.{digest_of(code)}")
        if known := described(package):
            found[CHECKOUT] = f"{known} ({checkout_of(package)})"
    own = () if has_this_package(answer) else (folder_of_this_package(),)
    return Toolchain(
        name,
        answer.python,
        dialect_of(package, found[TORCHTITAN]),
        found,
        paths=(*first, *own),
        sources=tuple(dict.fromkeys((*answer.sources, *([package.parent] if code else [])))),
        code=code,
    )


def _package(python: Path, answer: PythonAnswer, *, chosen: bool) -> Path:
    """The folder of the torchtitan that a Python would import, and no other one."""
    release = tuple(int(part) for part in answer.release.split(".")[:2])
    if release < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ToolchainError(
            f"{python} is Python {answer.release}, and converge's rank code needs {oldest} or newer"
        )
    for module, hint in _NEEDED.items():
        place = answer.places[module]
        if place is None or not (place / "__init__.py").is_file():
            empty = f" ({place} has no __init__.py)" if place else ""
            raise ToolchainError(f"{python} has no {module}{empty}; {hint.format(python=python)}")
    package, *others = places_of(answer, TORCHTITAN)
    if others and not chosen:
        raise ToolchainError(
            f"{python} has two torchtitans, {package}, which it would import, and {others[0]}; "
            "uninstall one of them, or take its folder off PYTHONPATH"
        )
    return package


def _is_identified(package: Path) -> bool:
    """Whether the version identifies the source: installed from an index or a commit.

    Only an installer writes ``RECORD``: an editable install leaves an ``egg-info`` in the checkout.
    """
    line = f"{package.name}/__init__.py,"
    return any(
        line in (distribution.read_text("RECORD") or "") and not is_local(distribution)
        for distribution in distributions(name=TORCHTITAN, path=[str(package.parent)])
    )
