"""Curves from anywhere: find out what a path is, and read it as evidence."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.foreign import file_of_foreign, path_exists, read_foreign
from harness.readers.names import check_columns
from harness.readers.run_folder import read_run, run_folder_of


def read_curves(path: Path, columns: Mapping[str, str] | None = None) -> Evidence:
    """A run folder or a curve in any of the formats that other tools write.

    ``columns`` maps signals (``loss``, ``grad_norm``, ``lr``, ``tokens``, …) and ``step`` to the
    names that they have here (a column, a key or a tag); a signal that it does not map is looked
    for under its known names. It applies where names are free: run folders and console logs have
    fixed ones, and TensorBoard and golden values their own steps.

    Raises EvidenceError when the path is nothing readable, cannot be understood or lacks a mapped
    name, StoreError for a damaged run folder of ours.
    """
    columns = columns or {}
    check_columns(columns)
    if not path_exists(path):
        raise EvidenceError(f"{path}: does not exist{_nearest(path)}")
    folder = run_folder_of(path)
    return read_run(folder) if folder is not None else read_foreign(path, columns)


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
