"""``job.json`` and ``in_force.json`` of a run folder, with the shapes that later stages rely on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from harness.errors import EvidenceError
from harness.store import read_json

METRICS = ("metrics.jsonl", "metrics.jsonl.part")
"""Names of the metrics file: of a run that ended, and of one that has not."""
PASSES = "passes"
"""Folder with a folder per pass, of a run that was made in several."""


def read_job(folder: Path) -> dict[str, Any] | None:
    """``job.json``; None for a folder in which nothing ran.

    Metrics without their job would be judged without any audit, so that raises EvidenceError, as
    a value of the wrong shape does. Raises StoreError for a damaged or newer file.
    """
    path = folder / "job.json"
    if path.is_file():
        return _checked(path, _JOB)
    if any((folder / name).is_file() for name in METRICS) or has_passes(folder):
        raise EvidenceError(
            f"{path}: is missing, so nothing says what this run was meant to be; copy the whole "
            "run folder, or run the job again"
        )
    return None


def has_passes(folder: Path) -> bool:
    """Whether a run was made in several passes, each with metrics of its own."""
    return any(path.name in METRICS for path in folder.glob(f"{PASSES}/*/metrics.jsonl*"))


def read_fault(path: Path) -> dict[str, Any]:
    """``faults/<index>.json``: a fault that struck; raises as read_job."""
    return _checked(path, _FAULT)


def read_in_force(folder: Path) -> dict[str, Any] | None:
    """``in_force.json``; None when the run ended before it was written. Raises as read_job."""
    path = folder / "in_force.json"
    return _checked(path, _IN_FORCE) if path.is_file() else None


def is_texts(value: object) -> TypeGuard[list[str]]:
    """Whether a JSON value is a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def is_counts(value: object) -> TypeGuard[dict[str, int]]:
    """Whether a JSON value is an object of counts."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def _is_names(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_texts, value.values()))


def _is_counts_seen(value: object) -> bool:
    """The same, where null is a count that nobody could tell."""
    known = isinstance(value, dict) and [each for each in value.values() if each is not None]
    return isinstance(known, list) and all(map(is_count, known))


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_steps(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


Shape = tuple[Callable[[object], bool], str]
_TEXT: Shape = (_is_text, "text")
_TEXTS: Shape = (is_texts, "list of texts")
_COUNT: Shape = (is_count, "count")
_COUNTS: Shape = (is_counts, "JSON object of counts")
_COUNTS_SEEN: Shape = (_is_counts_seen, "JSON object of counts")
_NAMES: Shape = (_is_names, "JSON object of lists of texts")
_STEPS: Shape = (_is_steps, "list of steps")
_OBJECT: Shape = (_is_object, "JSON object")
_OBJECTS: Shape = (_is_objects, "list of JSON objects")
_FLAG: Shape = (_is_flag, "true or false")
_TIME: Shape = (_is_time, "time")

_JOB: Mapping[str, Shape] = {
    "name": _TEXT,
    "identity": _TEXT,
    "steps": _COUNT,
    "parallelism": _COUNTS,
    "techniques": _TEXTS,
    "overrides": _OBJECT,
    "without_fixes": _TEXTS,
    "pipeline_schedule": _TEXT,
    "cp_rotation": _TEXT,
    "spmd_backend": _TEXT,
    "repeat": _TEXT,
    "sample_steps": _STEPS,
    "segments": _OBJECTS,
    "checkpoint_every": _COUNT,
    "faults": _OBJECTS,
    "elastic_nodes": _FLAG,
    "recovery": _OBJECT,
    "command": _OBJECT,
    "command.argv": _TEXTS,
    "command.launcher": _TEXT,
    "command.probed": _FLAG,
    "command.curves": _TEXT,
    "command.columns": _OBJECT,
    "command.environment": _OBJECT,
    "command.folder": _TEXT,
}
"""Keys of an inner object come after the object itself."""

_FAULT: Mapping[str, Shape] = {
    "index": _COUNT,
    "kind": _TEXT,
    "step": _COUNT,
    "at": _TIME,
    "pass": _COUNT,
    "torn": _FLAG,
    "rank": _COUNT,
    "node": _COUNT,
}

_IN_FORCE: Mapping[str, Shape] = {
    "degrees": _COUNTS_SEEN,
    "spmd_backend": _TEXT,
    "param_dtype": _TEXT,
    "param_dtypes": _NAMES,
    "mixed_precision_param": _TEXT,
    "float8": _OBJECT,
    "float8.modules": _COUNT,
    "float8.tp_styles": _COUNT,
    "compile": _OBJECT,
    "compile.regions": _COUNT,
    "compile.graphs": _COUNT,
    "async_tp": _OBJECT,
    "async_tp.fused_nodes": _COUNTS,
    "without_fixes": _TEXTS,
    "config": _OBJECT,
    "declared": _TEXTS,
    "probe": _OBJECT,
    "probe.wrapping": _TEXT,
    "probe.gradients": _TEXT,
    "probe.recomputes_loss": _FLAG,
}


def _checked(path: Path, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The file's object; a key that is absent or null is for the judge to miss."""
    document = read_json(path)
    for key, (fits, words) in shapes.items():
        value: Any = document
        for part in key.split("."):
            value = value.get(part) if value is not None else None
        if value is not None and not fits(value):
            raise EvidenceError(f"{path}: {key} is {value!r}, which is no {words}")
    return document
