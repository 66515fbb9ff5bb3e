"""``passes/NNN/start.json``: one start of a program without the probe, as converge made it.

Such a program leaves a curve of each of its starts and nothing else of ours, so converge itself
writes down what only it knows: with how many ranks it started the program, which curve is that of
this start, when training went on, and how the program ended. The curve shows after which step it
went on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict, cast

from converge_harness.run_folder.documents import upgraded
from converge_harness.run_folder.layout import START
from converge_harness.run_folder.passes import pass_folder, pass_folders
from converge_harness.run_folder.shapes import COUNT, TEXT, TIME, Shape, is_integer, misfit


class StartDocument(TypedDict, total=False):
    """The file without its schema version."""

    segment: int | None
    """Index of the segment of an elastic set; None for other sets."""
    ranks: int
    curve: str
    """Path of its own curve, from the run folder."""
    at: float
    """When it was started; seconds since 1970."""
    returncode: int | None
    """Of its launcher; None while it runs, and for one that converge had to end, or asked to."""
    first_row_at: float | None
    """Of a fault set: when converge first saw a step in its curve, soon after it had ended; seconds
    since 1970. None: it saw none."""


SHAPES: Mapping[str, Shape] = {
    "segment": COUNT,
    "ranks": COUNT,
    "curve": TEXT,
    "at": TIME,
    "returncode": (is_integer, "a whole number"),
    "first_row_at": TIME,
}
REQUIRED = ("ranks", "curve", "at")


def start_file(run_folder: Path, number: int) -> Path:
    """The file of a start, which need not exist; ``number`` is that of its pass, from 1."""
    return pass_folder(run_folder, number) / START


def start_files(run_folder: Path) -> dict[int, Path]:
    """The files of a run's starts by number, in order; empty for runs of any other kind."""
    found = {int(folder.name): folder / START for folder in pass_folders(run_folder)}
    return {number: path for number, path in found.items() if path.is_file()}


def read_start(path: Path) -> StartDocument:
    """Read such a file.

    Raises OSError, and ValueError for a file that is damaged, newer, or lacks what is required.
    """
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not a JSON object")  # noqa: TRY004 (a damaged file)
    value = upgraded(START, value)
    if found := misfit(value, SHAPES):
        raise ValueError(found)
    if missing := [key for key in REQUIRED if value.get(key) is None]:
        raise ValueError(f"lacks {', '.join(missing)}")
    return cast("StartDocument", value)


def last_start_ended_well(run_folder: Path) -> bool:
    """Whether the program ended with 0 in the last of a run's starts, and left a curve of it."""
    files = list(start_files(run_folder).values())
    try:
        last = read_start(files[-1])
    except (IndexError, OSError, ValueError):
        return False
    return last.get("returncode") == 0 and (run_folder / last["curve"]).exists()
