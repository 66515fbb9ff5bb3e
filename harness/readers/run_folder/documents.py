"""``job.json`` and ``in_force.json`` of a run folder, with their values' types checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from converge_harness.errors import EvidenceError
from converge_harness.run_folder import faults, in_force, job
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.layout import IN_FORCE, JOB, METRICS_FILES
from converge_harness.run_folder.passes import passes_with_metrics
from converge_harness.run_folder.shapes import Shape, misfit
from converge_harness.store import read_json


def read_job(folder: Path) -> JobDocument | None:
    """``job.json``; None for a folder in which nothing ran.

    Metrics without their job would be judged without any audit, so they raise EvidenceError, as
    does a value of the wrong type. Raises StoreError for a damaged or newer file.
    """
    path = folder / JOB
    if path.is_file():
        return cast("JobDocument", _checked(path, job.SHAPES))
    if any((folder / name).is_file() for name in METRICS_FILES) or passes_with_metrics(folder):
        raise EvidenceError(
            f"{path}: is missing, so it is unknown what this run should have been; copy the whole "
            "run folder, or run the job again"
        )
    return None


def read_fault(path: Path) -> dict[str, Any]:
    """``faults/<index>.json``: a fault that happened; raises what read_job raises."""
    return _checked(path, faults.SHAPES)


def read_in_force(folder: Path) -> dict[str, Any] | None:
    """``in_force.json``; None if the run ended before. Raises what read_job raises."""
    path = folder / IN_FORCE
    return _checked(path, in_force.SHAPES) if path.is_file() else None


def _checked(path: Path, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The file's object; missing and null keys are left to the judge."""
    document = read_json(path)
    if found := misfit(document, shapes):
        raise EvidenceError(f"{path}: {found}")
    return document
