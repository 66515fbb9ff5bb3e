"""Which checkpoints of a run are whole, and torn ones set aside before its ranks start again.

torchtitan takes the newest checkpoint with ``.metadata`` for whole. A node that dies may leave one
whose save had not returned, or whose shards never came to the disk. So ranks leave a manifest once
a save has returned: how long the files of the checkpoint then were.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from converge_harness.run_folder.documents import SCHEMA, SchemaError, upgraded, write_json
from converge_harness.run_folder.layout import (
    CHECKPOINT_METADATA,
    CHECKPOINTS,
    SAVED,
    STATE,
    TORN,
    arrays_name,
    manifest_name,
)
from converge_harness.run_folder.passes import pass_folders

_STEP = re.compile(r"step-(\d+)")


class TornCheckpointError(Exception):
    """A torn checkpoint cannot be set aside."""


def has_metadata(checkpoint: Path) -> bool:
    """Whether a checkpoint says that it is whole: torch.distributed.checkpoint writes it last."""
    return (checkpoint / CHECKPOINT_METADATA).is_file()


def write_manifest(checkpoint: Path, step: int, of_pass: Path) -> None:
    """Leave how long the files of a checkpoint are whose save has returned on all ranks.

    For one rank, in the folder of its pass. A checkpoint without metadata gets none.
    """
    if not has_metadata(checkpoint):
        return
    sizes = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir())}
    path = of_pass / STATE / manifest_name(step)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"schema": SCHEMA, "files": sizes})


def set_torn_aside(run_folder: Path) -> tuple[int, ...]:
    """Move a run's torn checkpoints to ``torn/``; their steps. Nobody may write or load them now.

    Raises TornCheckpointError when one cannot be moved.
    """
    torn = []
    for checkpoint in sorted((run_folder / CHECKPOINTS).glob("step-*")):
        named = _STEP.fullmatch(checkpoint.name)
        if named is None or is_whole(run_folder, checkpoint, int(named[1])):
            continue
        try:
            (run_folder / TORN).mkdir(exist_ok=True)
            checkpoint.rename(_free(run_folder / TORN / checkpoint.name))
        except OSError as error:
            raise TornCheckpointError(
                f"{checkpoint}: cannot set the torn checkpoint aside: {error}"
            ) from error
        torn.append(int(named[1]))
    return tuple(torn)


def is_whole(run_folder: Path, checkpoint: Path, step: int) -> bool:
    """Whether nothing of a checkpoint is missing, as far as file sizes tell.

    It has metadata, and its files are as long as the last pass that saved its step found them when
    the save had returned.
    """
    sizes = _sizes(run_folder, step)
    if sizes is None or not has_metadata(checkpoint):
        return False
    try:
        return all((checkpoint / name).stat().st_size >= size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _sizes(run_folder: Path, step: int) -> dict[str, int] | None:
    """What the last pass that began to save the step says of its files; None: not to the end."""
    for of_pass in reversed(pass_folders(run_folder)):
        state = of_pass / STATE
        if not (state / arrays_name(SAVED, step)).is_file():
            continue
        path = state / manifest_name(step)
        try:
            told = json.loads(path.read_bytes())
            return dict(upgraded(path.name, told)["files"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SchemaError):
            return None
    return None


def _free(path: Path) -> Path:
    """The path, or with a number at its end that nothing has yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
