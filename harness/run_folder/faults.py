"""``faults/``: which faults of a job's script have happened, and when.

``faults/<index>.json`` is written before a fault happens, and prevents it from happening again
whenever its step is replayed. A fault that converge causes also has
``faults/<index>.over.json``: the ranks wait until it exists.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from converge_harness.run_folder.documents import SCHEMA, write_json
from converge_harness.run_folder.job import RankFault
from converge_harness.run_folder.layout import FAULTS
from converge_harness.run_folder.shapes import COUNT, FLAG, TEXT, TIME, Shape

HELD = ("preempt", "agent_loss", "join")
"""Faults that converge causes, and for which the ranks wait."""

StruckDocument = TypedDict(
    "StruckDocument",
    {
        "index": int,
        "kind": str,
        "step": int,
        "at": float,
        "pass": int,
        "torn": bool,
        "rank": int,
        "node": int,
        "curve_step": int,
    },
    total=False,
)
"""``faults/<index>.json`` without its schema version; ``SHAPES`` says what its keys are."""

SHAPES: Mapping[str, Shape] = {
    "index": COUNT,
    "kind": TEXT,
    "step": COUNT,
    "at": TIME,
    "pass": COUNT,
    "torn": FLAG,
    "rank": COUNT,
    "node": COUNT,
    "curve_step": COUNT,
}
"""Types of the keys of ``faults/<index>.json``: ``index`` is the position in the job's script,
``at`` is in seconds since 1970, ``torn`` is whether the fault leaves a torn checkpoint,
``curve_step`` is the newest step that converge had read in the curve of a program without the probe
when it struck."""
REQUIRED = ("index", "kind", "step", "at")


def struck_file(run_folder: Path, index: int) -> Path:
    """It exists once the fault has happened."""
    return run_folder / FAULTS / f"{index}.json"


def over_file(run_folder: Path, index: int) -> Path:
    """It exists once the ranks need not wait for the fault any more."""
    return run_folder / FAULTS / f"{index}.over.json"


def struck_files(run_folder: Path) -> dict[int, Path]:
    """By index, in the order of the script."""
    found = {
        int(path.stem): path
        for path in (run_folder / FAULTS).glob("*.json")
        if path.stem.isdecimal()
    }
    return dict(sorted(found.items()))


HOLD_SECONDS = 120.0
"""The longest time that the ranks wait for a fault that converge causes."""
POLL_SECONDS = 0.05


def hold_until(over: Path, or_else: Callable[[], bool] = lambda: False) -> None:
    """Wait in a rank for a fault of converge, until its file exists or ``or_else`` is true."""
    deadline = time.monotonic() + HOLD_SECONDS
    while not (over.exists() or or_else()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def struck_document(
    index: int, *, kind: str, step: int, pass_number: int, torn: bool
) -> StruckDocument:
    """What is written of every fault that happens now."""
    return {
        "index": index,
        "kind": kind,
        "step": step,
        "at": time.time(),
        "pass": pass_number,
        "torn": torn,
    }


def over_document(index: int) -> StruckDocument:
    """What ``faults/<index>.over.json`` says. That the file exists is enough for the ranks."""
    return {"index": index, "at": time.time()}


def record_struck(
    run_folder: Path,
    index: int,
    fault: RankFault,
    pass_number: int,
    *,
    rank: int | None = None,
    torn: bool | None = None,
) -> None:
    """Record that a fault of the ranks happens now. The file is synced when this returns.

    ``rank`` and ``torn`` default to what the fault says. Several ranks may call this at once for
    one fault: the file of the first stays.
    """
    path = struck_file(run_folder, index)
    path.parent.mkdir(exist_ok=True)
    who = fault.rank if rank is None else rank
    own = path.with_name(f"{path.name}.{who}.{os.getpid()}")  # nodes may have equal ids
    document = struck_document(
        index,
        kind=fault.kind,
        step=fault.step,
        pass_number=pass_number,
        torn=fault.kind in ("ckpt_torn", "disk_full") if torn is None else torn,
    )
    document["rank"] = who
    write_json(own, {"schema": SCHEMA, **document})
    try:
        with suppress(FileExistsError):
            os.link(own, path)
    except OSError:  # a file system without hard links; at the same moment, the last one stays
        if not path.exists():
            own.replace(path)
    own.unlink(missing_ok=True)
    for written in (path, path.parent):
        descriptor = os.open(written, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
