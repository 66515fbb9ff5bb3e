"""Curves from anywhere: finds out what a path is, and reads it as evidence."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from converge_harness.errors import EvidenceError
from converge_harness.model import Column, Evidence
from converge_harness.readers.foreign.names import NoColumnError, check_columns
from converge_harness.readers.foreign.registry import file_of_foreign, path_exists, read_foreign
from converge_harness.readers.run_folder.run import read_run, run_folder_of


def read_curves(
    path: Path,
    columns: Mapping[str, str] | None = None,
    *,
    since: int | None = None,
    without: Collection[str] = (),
    count_from_1: bool = False,
) -> Evidence:
    """Read a run folder, or a curve in any format that other tools write.

    ``columns`` maps signals (``loss``, ``grad_norm``, ``lr``, ``tokens``, …) and ``step`` to their
    names in the file (a column, a key or a tag); a signal that it does not map is looked up under
    its known names. It has no effect where names are fixed: in run folders and console logs, and
    for the steps of TensorBoard and golden values. ``since`` leaves out all earlier steps,
    ``without`` the signals that it names; a curve need not have the columns that these are mapped
    to. ``count_from_1`` adds 1 to the steps of a curve that begins at step 0.

    Raises EvidenceError when the path is not readable, cannot be understood, lacks a mapped name or
    has no step from ``since`` on, and for a run folder with ``since`` or ``without``. Raises
    StoreError for a damaged run folder.
    """
    columns = columns or {}
    check_columns(columns)
    if not path_exists(path):
        raise EvidenceError(f"{path}: does not exist{_nearest(path)}")
    folder = run_folder_of(path)
    if folder is None:
        evidence = _read_without(path, columns, without)
        evidence = evidence.counting_from_1() if count_from_1 else evidence
        return evidence if since is None else _since(path, evidence, since)
    given = {"--from": since, "--without": " ".join(without) or None}
    for option, value in given.items():
        if value is not None:
            raise EvidenceError(
                f"{path}: {option} {value} is for curves, and this is a run folder, whose evidence "
                f"is judged as a whole; leave {option} out"
            )
    return read_run(folder)


def _read_without(path: Path, columns: Mapping[str, str], signals: Collection[str]) -> Evidence:
    """A curve without some signals; it may lack the columns that they are mapped to."""
    try:
        return read_foreign(path, columns).without(signals)
    except NoColumnError as error:
        if error.signal not in signals:
            raise
    others = {signal: name for signal, name in columns.items() if signal not in signals}
    return read_foreign(path, others).without(signals)


def _since(path: Path, evidence: Evidence, step: int) -> Evidence:
    """A curve from a step on, with the problems of those steps."""
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
        replay_conflicts=tuple(each for each in evidence.replay_conflicts if each.step >= step),
    )


def same_path(first: Path, second: Path) -> bool:
    """Whether ``read_curves`` reads one and the same file or folder for two paths.

    A folder and the one file that is read in it count as the same, and so do links.
    """
    try:
        return _read_at(first).samefile(_read_at(second))
    except OSError:
        return False  # one does not exist; reading it gives a better message


def _read_at(path: Path) -> Path:
    return run_folder_of(path) or file_of_foreign(path)


_LIKE = 0.7
"""Least similarity of two names, without what comes after their last dot."""


def _nearest(path: Path) -> str:
    """A suggestion: an existing path with a similar name."""
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    # Of main.csv and branch.csv more than half is alike.
    like = [
        entry.name
        for entry in siblings
        if difflib.SequenceMatcher(None, path.stem, entry.stem).ratio() >= _LIKE
    ]
    close = difflib.get_close_matches(path.name, like, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
