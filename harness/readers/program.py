"""The evidence of a program of the user's (docs/architecture.md, "A command trainer")."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.foreign import read_foreign

_DATA_TYPES = ("training.dtype", "training.mixed_precision_param")
"""Keys of its train config that name one."""


def is_probed(job: Mapping[str, Any]) -> bool:
    """Whether the job's program was to leave all evidence; else it left a curve of its own."""
    return job["command"].get("probed") is not False


def of_curve(folder: Path, job: Mapping[str, Any]) -> Evidence:
    """The curve that a program left which is not probed, read as any foreign one.

    Raises EvidenceError when it is not there, lacks a column, or cannot be understood.
    """
    command = job["command"]
    told = command.get("curves")
    if told is None:
        raise EvidenceError(f"{folder / 'job.json'}: names no curves of a program without a probe")
    try:
        # The run folder may have been moved since.
        path = folder / Path(told).relative_to(job["run_folder"])
    except (ValueError, KeyError):
        raise EvidenceError(
            f"{told}: lies outside of the run folder, so it may be the curve of another run"
        ) from None
    return read_foreign(path, dict(command.get("columns") or {}))


def unread(problem: str, **known: Any) -> Evidence:
    """Evidence of a run whose files say nothing, and why."""
    nothing = np.zeros(0, dtype=np.int64)
    return Evidence(steps=nothing, signals={}, complete=False, problems=(problem,), **known)


def data_types(job: Mapping[str, Any]) -> set[object]:
    """Those that the job's train config names, under the set's own settings."""
    found: set[object] = set()
    for key in _DATA_TYPES:
        value: object = job["train_config"]["settings"]
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found.add((job.get("overrides") or {}).get(key, value))
    return found
