"""Torn checkpoints, told without torch, and set aside before a run's ranks start again."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import StoreError
from harness.store import read_json
from harness.trainers import CHECKPOINTS, has_metadata, pass_folders

TORN = "torn"
"""In the run folder."""
_STEP = re.compile(r"step-(\d+)")


def set_torn_aside(folder: Path) -> tuple[int, ...]:
    """Move a run's torn checkpoints to ``torn/``; their steps. No process of the run may live.

    Torn is a checkpoint without the metadata that are written last, one whose save did not return
    on all ranks, and one with files shorter than they were then (``state/saved-step-N.json`` of
    the pass that saved it, written by the ranks).
    Raises StoreError when a checkpoint cannot be moved.
    """
    torn = []
    for checkpoint in sorted((folder / CHECKPOINTS).glob("step-*")):
        named = _STEP.fullmatch(checkpoint.name)
        if named is None or is_whole(folder, checkpoint, int(named[1])):
            continue
        try:
            (folder / TORN).mkdir(exist_ok=True)
            checkpoint.rename(_free(folder / TORN / checkpoint.name))
        except OSError as error:
            raise StoreError(
                f"{checkpoint}: cannot set the torn checkpoint aside: {error}"
            ) from error
        torn.append(int(named[1]))
    return tuple(torn)


def is_whole(folder: Path, checkpoint: Path, step: int) -> bool:
    """Whether nothing of a checkpoint is missing, as far as file sizes tell."""
    sizes = _sizes(folder, step)
    if sizes is None or not has_metadata(checkpoint):
        return False
    try:
        return all((checkpoint / name).stat().st_size >= size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _sizes(folder: Path, step: int) -> dict[str, int] | None:
    """What the last pass that began to save the step says of its files; None: not to the end."""
    for of_pass in reversed(pass_folders(folder)):
        state = of_pass / "state"
        if (state / f"saved-step-{step:08d}.npz").is_file():
            try:
                files: dict[str, int] = read_json(state / f"saved-step-{step:08d}.json")["files"]
            except (StoreError, KeyError):
                return None
            return files
    return None


def _free(path: Path) -> Path:
    """The path, or with a number at its end that nothing has yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
