"""Curves from anywhere: find out what a path is, and read it as evidence."""

from __future__ import annotations

import difflib
from pathlib import Path

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.console import is_console, read_console
from harness.readers.lines import read_text
from harness.readers.run_folder import read_run, require_foreign, run_folder_of
from harness.readers.tables import read_csv, read_jsonl
from harness.readers.tensorboard import is_tensorboard, read_tensorboard

READABLE = "readable are run folders, TensorBoard folders, JSONL, CSV and torchtitan's console logs"


def read_curves(path: Path) -> Evidence:
    """A run folder, a TensorBoard folder, or a JSONL, CSV or console-log file.

    Raises EvidenceError when it is none of these or cannot be understood, StoreError for a damaged
    run folder of ours.
    """
    if not _exists(path):
        raise EvidenceError(f"{path}: does not exist{_nearest(path)}")
    folder = run_folder_of(path)
    if folder is not None:
        return read_run(folder)
    if is_tensorboard(path):
        return read_tensorboard(path)
    if path.is_dir():
        raise EvidenceError(f"{path}: has no job.json and no event files; {READABLE}")
    text = read_text(path)
    if not text.strip():
        raise EvidenceError(f"{path}: is empty; {READABLE}")
    if path.suffix in (".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        require_foreign(path, text)
        return read_jsonl(path, text)
    if is_console(text):
        return read_console(path, text)
    if path.suffix in (".csv", ".tsv") or any(mark in text.split("\n", 1)[0] for mark in ",;\t"):
        return read_csv(path, text)
    raise EvidenceError(f"{path}: is no curve; {READABLE}")


def _exists(path: Path) -> bool:
    """As ``Path.exists``, which raises for a name longer than the file system takes."""
    try:
        return path.exists()
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _nearest(path: Path) -> str:
    """A suggestion: what else is there with nearly that name."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
