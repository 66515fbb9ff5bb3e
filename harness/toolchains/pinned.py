"""What is installed in a Python, as lines of a requirements file for somebody else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from converge_harness import DISTRIBUTION
from converge_harness.toolchains.find import all_packages, is_edited
from converge_harness.toolchains.user_python import ask

_NOT_PINNED = frozenset({DISTRIBUTION, "pip"})
_TORCH_BUILD = re.compile(r"\+((?:cpu|xpu|cu\d+|rocm[\d.]+))$")
"""The local version of a wheel that only PyTorch's own index has, in the folder of that name."""
TORCH_INDEX = "https://download.pytorch.org/whl/"


@dataclass(frozen=True, slots=True)
class Pinned:
    """The packages of a Python, except pip and this one."""

    release: str
    """Of the Python: ``3.12.3``."""
    packages: str
    """``find.all_packages``: by which it is seen whether it is as it was."""
    lines: tuple[str, ...]
    """For pip, sorted by name."""
    lacking: tuple[str, ...]
    """Packages that nobody else can install, each as a sentence: ``NAME VERSION was installed from
    a folder or file``."""


def pinned(python: Path) -> Pinned:
    """Ask a Python for its packages. Raises ToolchainError if it does not start."""
    answer = ask(python)
    found = dict(_named(answer.paths))
    lines, lacking = [], []
    for name, distribution in sorted(found.items()):
        if name in _NOT_PINNED:
            continue
        origin, shown = _origin(distribution), f"{name} {distribution.version}"
        if is_edited(distribution):
            lacking.append(f"{shown} was edited where it is installed")
        elif not origin:
            lines.append(f"{name}=={distribution.version}")
        elif vcs := origin.get("vcs_info"):
            lines.append(f"{name} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}")
        elif str(origin.get("url", "")).startswith("file:"):
            lacking.append(f"{shown} was installed from a folder or file")
        else:
            lines.append(f"{name} @ {origin['url']}")
    builds = dict.fromkeys(each[1] for line in lines if (each := _TORCH_BUILD.search(line)))
    indexes = [f"--extra-index-url {TORCH_INDEX}{build}" for build in builds]
    packages = all_packages(list(answer.paths))
    return Pinned(answer.release, packages, (*indexes, *lines), tuple(lacking))


def _named(paths: tuple[str, ...]) -> Iterator[tuple[str, Distribution]]:
    """By normalized name, those that are imported: the first of a name, so they come last."""
    for path in reversed(paths):
        for distribution in distributions(path=[path]):
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
            if name:
                yield name, distribution


def _origin(distribution: Distribution) -> Mapping[str, Any]:
    """Where it was installed from (PEP 610); empty for an index."""
    try:
        found = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
