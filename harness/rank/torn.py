"""Torn checkpoints of a run that a scheduler requeued, set aside before its ranks load.

torchtitan takes the newest checkpoint with ``.metadata`` for whole. A node that dies may leave one
whose save had not returned, or whose shards never came to the disk. On one machine the harness
looks after that (``harness.launch.torn``); here nobody else is there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_STEP = re.compile(r"step-(\d+)")


def set_torn_aside(run_folder: Path) -> None:
    """Move checkpoints that are not surely whole to ``torn/``. For one rank, before any loads.

    Whole is a checkpoint with metadata whose files are as long as the last pass that saved its step
    found them when the save had returned (``harness.rank.manifest``).
    """
    for checkpoint in sorted((run_folder / "checkpoint").glob("step-*")):
        named = _STEP.fullmatch(checkpoint.name)
        if named and not _is_whole(run_folder / "passes", checkpoint, int(named[1])):
            (run_folder / "torn").mkdir(exist_ok=True)
            checkpoint.rename(_free(run_folder / "torn" / checkpoint.name))


def _is_whole(passes: Path, checkpoint: Path, step: int) -> bool:
    sizes = _sizes(passes, step)
    if sizes is None or not (checkpoint / ".metadata").is_file():
        return False
    try:
        return all((checkpoint / name).stat().st_size >= size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _sizes(passes: Path, step: int) -> dict[str, int] | None:
    """What the last pass that began to save a step says of the files; None: not to the end."""
    began = [state for state in passes.glob("*/state") if (state / _saved(step, "npz")).is_file()]
    if not began:
        return None
    last = max(began, key=lambda state: int(state.parent.name))
    try:
        manifest = json.loads((last / _saved(step, "json")).read_text(encoding="utf-8"))
        return dict(manifest["files"])
    except (OSError, ValueError, KeyError):
        return None


def _saved(step: int, kind: str) -> str:
    return f"saved-step-{step:08d}.{kind}"


def _free(path: Path) -> Path:
    """The path, or with a number at its end that nothing has yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
