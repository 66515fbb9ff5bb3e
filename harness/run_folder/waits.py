"""``wait.json``: the steps after which a run's ranks wait, so that other runs can come as far.

The harness writes it before they start, and again without a step to let them train on after that.
A run without it never waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from converge_harness.run_folder.layout import WAIT


def wait_file(run_folder: Path) -> Path:
    return run_folder / WAIT


def waits_document(steps: Iterable[int]) -> Mapping[str, Any]:
    """The file's content."""
    return {"after": sorted(steps)}


def read_waits(run_folder: Path) -> frozenset[int]:
    """The steps that the file names; none if it is not there. It is replaced as a whole."""
    try:
        return frozenset(json.loads(wait_file(run_folder).read_bytes())["after"])
    except FileNotFoundError:
        return frozenset()
