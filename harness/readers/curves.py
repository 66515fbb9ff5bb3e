"""Curves from anywhere: find out what a path is, and read it as evidence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from converge_harness.errors import EvidenceError
from converge_harness.model import Column, Evidence
from converge_harness.readers.foreign.names import check_columns
from converge_harness.readers.foreign.registry import file_of_foreign, path_exists, read_foreign
from converge_harness.readers.run_folder.run import read_run, run_folder_of


def read_curves(
    path: Path, columns: Mapping[str, str] | None = None, *, since: int | None = None
) -> Evidence:
    """A run folder or a curve in any of the formats that other tools write.

    ``columns`` maps signals (``loss``, ``grad_norm``, ``lr``, ``tokens``, …) and ``step`` to the
    names that they have here (a column, a key or a tag); a signal that it does not map is looked
    for under its known names. It applies where names are free: run folders and console logs have
    fixed ones, and TensorBoard and golden values their own steps. ``since`` leaves out the steps
    before it.

    Raises EvidenceError when the path is nothing readable, cannot be understood, lacks a mapped
    name or has no step from ``since`` on, and for a run folder that is to be cut; StoreError for a
    damaged run folder of ours.
    """
    columns = columns or {}
    check_columns(columns)
    if not path_exists(path):
        raise EvidenceError(f"{path}: does not exist{_nearest(path)}")
    folder = run_folder_of(path)
    if folder is None:
        evidence = read_foreign(path, columns)
        return evidence if since is None else _since(path, evidence, since)
    if since is not None:
        raise EvidenceError(
            f"{path}: --from {since} cuts curves, and this is a run folder, whose evidence is "
            "judged as a whole; leave --from out"
        )
    return read_run(folder)


def _since(path: Path, evidence: Evidence, step: int) -> Evidence:
    """A curve from a step on, and what is said of its steps."""
    kept = evidence.steps >= step
    if not kept.any():
        last = f"its last step is {evidence.steps[-1]}" if kept.size else "it has no step"
        raise EvidenceError(f"{path}: --from {step} leaves nothing: {last}")
    return replace(
        evidence,
        steps=evidence.steps[kept],
        signals={
            signal: Column(column.values[kept], column.present[kept])
            for signal, column in evidence.signals.items()
        },
        replayed=tuple(each for each in evidence.replayed if each >= step),
        replay_conflicts=tuple(
            clause
            for clause in evidence.replay_conflicts
            if (at := _AT_STEP.match(clause)) is None or int(at[1]) >= step
        ),
    )


_AT_STEP = re.compile(r"step (\d+): ")


def same_path(first: Path, second: Path) -> bool:
    """Whether ``read_curves`` reads one and the same file or folder for two paths.

    A folder and the one file in it that is read count as the same, and so do links.
    """
    try:
        return _read_at(first).samefile(_read_at(second))
    except OSError:
        return False  # one of them is not there, which reading it says better


def _read_at(path: Path) -> Path:
    return run_folder_of(path) or file_of_foreign(path)


def _nearest(path: Path) -> str:
    """A suggestion: what else is there with nearly that name."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
