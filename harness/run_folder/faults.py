"""``faults/``: which faults of a job's script were made to happen, and when.

``faults/<index>.json`` is there before a fault strikes, and keeps it from striking again however
often its step is replayed. A fault that the harness makes has ``faults/<index>.over.json`` as well:
until then the ranks hold still.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from converge_harness.run_folder.layout import FAULTS
from converge_harness.run_folder.shapes import COUNT, FLAG, TEXT, TIME, Shape

HELD = ("preempt", "agent_loss", "join")
"""Faults that the harness makes."""


SHAPES: Mapping[str, Shape] = {
    "index": COUNT,
    "kind": TEXT,
    "step": COUNT,
    "at": TIME,
    "pass": COUNT,
    "torn": FLAG,
    "rank": COUNT,
    "node": COUNT,
}
"""Of the keys of ``faults/<index>.json``: ``index`` is the place in the job's script, ``at`` is in
seconds since 1970, ``torn`` says whether the fault leaves a torn checkpoint."""
REQUIRED = ("index", "kind", "step", "at")


def struck_file(run_folder: Path, index: int) -> Path:
    """Its presence says that the fault has struck."""
    return run_folder / FAULTS / f"{index}.json"


def over_file(run_folder: Path, index: int) -> Path:
    """Its presence says that the ranks need not hold still for the fault any more."""
    return run_folder / FAULTS / f"{index}.over.json"


def struck_files(run_folder: Path) -> dict[int, Path]:
    """By index, in the order of the script."""
    found = {
        int(path.stem): path
        for path in (run_folder / FAULTS).glob("*.json")
        if path.stem.isdecimal()
    }
    return dict(sorted(found.items()))
