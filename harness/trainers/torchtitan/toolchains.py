"""Toolchains with torchtitan in them: one of a release series that a rank adapter speaks to."""

from __future__ import annotations

from pathlib import Path

from harness.errors import ToolchainError
from harness.model import Toolchain
from harness.toolchain import (
    DISTRIBUTIONS,
    build_hint,
    python_of,
    site_packages,
    toolchain_root,
    versions,
)
from harness.trainers.torchtitan.releases import TITAN_02, TITAN_03

DIALECTS = {"0.2": TITAN_02, "0.3": TITAN_03}
"""torchtitan release series to the rank adapter that speaks to it."""


def find_toolchain(name: str, root: Path | None) -> Toolchain:
    """A toolchain by name, with the versions of what matters in it.

    Raises:
        ToolchainError: it is not there, is no virtual environment with torchtitan, or its
            torchtitan is of a series that no rank adapter speaks to.
    """
    folder = (root or toolchain_root()) / name
    python = python_of(name, folder)
    build = build_hint(name)
    found = versions(site_packages(folder), DISTRIBUTIONS)
    missing = [needed for needed in ("torch", "torchtitan") if needed not in found]
    if missing:
        raise ToolchainError(f"toolchain {folder} has no {' and no '.join(missing)}; re{build}")
    # A commit may lie before or after a release and bear its version: the name says which is meant.
    told = name.removeprefix("torchtitan-") if "@" in name else found["torchtitan"]
    series = ".".join(told.split(".")[:2])
    if series not in DIALECTS:
        supported = ", ".join(f"{known}.x" for known in DIALECTS)
        raise ToolchainError(
            f"toolchain {folder} has torchtitan {found['torchtitan']}; supported: {supported}"
        )
    return Toolchain(name=name, python=python, dialect=DIALECTS[series], versions=found)


def assume_toolchain(name: str, root: Path | None) -> Toolchain:
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
