"""Finds toolchains on disk and reads their versions without starting them.

A toolchain is a virtual environment ``<root>/<name>`` with one torchtitan in it, made by
``nox -s toolchain -- NAME``; what else is in it may follow torchtitan's version in its name
(``torchtitan-0.3.0-streaming``), and so may ``@REVISION``: then torchtitan is that commit of a git
checkout (``torchtitan-0.3.0@main``), spoken to as that release is, and the commit is part of its
version. The root is
``$CONVERGE_TOOLCHAINS``, else ``.toolchains`` in the current directory.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import Distribution, distributions
from pathlib import Path

from harness.errors import ToolchainError
from harness.model import Toolchain

ROOT_VARIABLE = "CONVERGE_TOOLCHAINS"
DEFAULT_ROOT = ".toolchains"
DISTRIBUTIONS = (
    *("torch", "torchtitan", "torchao", "triton", "numpy"),
    *("mosaicml-streaming", "converge"),
)
"""What can change a job's numbers, or says which rank code runs."""
DIALECTS = {"0.2": "titan_0_2", "0.3": "titan_0_3"}
"""torchtitan release series to the rank adapter that speaks to it."""


def toolchain_root() -> Path:
    """The folder that holds toolchains."""
    return Path(os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT).absolute()


def available_toolchains(root: Path | None = None) -> tuple[str, ...]:
    """Names of the environments under the root, sorted."""
    folder = root or toolchain_root()
    return tuple(sorted(python.parent.parent.name for python in folder.glob("*/bin/python")))


def find_toolchain(name: str, root: Path | None = None) -> Toolchain:
    """A toolchain by name, with the versions of what matters in it.

    Raises:
        ToolchainError: it is not there, is no virtual environment with torchtitan, or its
            torchtitan is of a series that no rank adapter speaks to.
    """
    folder = (root or toolchain_root()) / name
    python = folder / "bin" / "python"
    checkout = "CONVERGE_CHECKOUT=FOLDER " if "@" in name else ""  # a clone with that revision
    build = f"build it with: {checkout}nox -s toolchain -- {name}"
    if not os.access(python, os.X_OK):
        there = ", ".join(available_toolchains(root)) or "none"
        raise ToolchainError(
            f"no toolchain {name!r} in {folder.parent} (there: {there}); {build}, or say with "
            "CONVERGE_TOOLCHAINS=FOLDER where toolchains are"
        )
    versions = _versions(folder)
    missing = [needed for needed in ("torch", "torchtitan") if needed not in versions]
    if missing:
        raise ToolchainError(f"toolchain {folder} has no {' and no '.join(missing)}; re{build}")
    # A commit may lie before or after a release and bear its version: the name says which is meant.
    told = name.removeprefix("torchtitan-") if "@" in name else versions["torchtitan"]
    series = ".".join(told.split(".")[:2])
    if series not in DIALECTS:
        supported = ", ".join(f"{known}.x" for known in DIALECTS)
        raise ToolchainError(
            f"toolchain {folder} has torchtitan {versions['torchtitan']}; supported: {supported}"
        )
    return Toolchain(name=name, python=python, dialect=DIALECTS[series], versions=versions)


def assume_toolchain(name: str, root: Path | None = None) -> Toolchain:
    """A toolchain as it will be once built, for plans that launch nothing.

    Only torchtitan's version is known, from the name (``torchtitan-0.3.0``), so identities differ
    from those of the built one. One that is there is returned as it is.

    Raises:
        ToolchainError: as :func:`find_toolchain`, also for a name that tells no known version.
    """
    distribution, version, *_ = [*name.split("-"), ""]
    series = ".".join(version.split(".")[:2])
    folder = (root or toolchain_root()) / name
    if folder.exists() or distribution != "torchtitan" or series not in DIALECTS:
        return find_toolchain(name, root)
    return Toolchain(
        name=name,
        python=folder / "bin" / "python",
        dialect=DIALECTS[series],
        versions={"torchtitan": version},
    )


def _versions(environment: Path) -> dict[str, str]:
    """Versions from the distributions' metadata: nothing is imported, no process started."""
    site_packages = [str(folder) for folder in environment.glob("lib/python3*/site-packages")]
    found: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        for distribution in distributions(name=name, path=site_packages):
            found.setdefault(name, _version(distribution))
    return found


def _version(distribution: Distribution) -> str:
    """The version; of one that was built from a git checkout with the commit: ``0.3.0+g1a2b3c…``.

    Two commits of one version are two releases: their runs must not be taken for each other. pip
    leaves the commit in ``direct_url.json`` (PEP 610).
    """
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        commit = str(origin["vcs_info"]["commit_id"])
    except (KeyError, TypeError, ValueError):
        return distribution.version
    joint = "." if "+" in distribution.version else "+"
    return f"{distribution.version}{joint}g{commit[:12]}"
