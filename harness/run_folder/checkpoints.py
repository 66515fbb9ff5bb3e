"""Which checkpoints of a run are complete; sets torn ones aside before its ranks restart.

torchtitan assumes that the newest checkpoint with ``.metadata`` is complete. A node that dies may
leave one whose save had not returned, or whose shards never reached the disk. So ranks write a
manifest once a save has returned: the sizes of the checkpoint's files at that time.
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
    """Whether a checkpoint has metadata, which torch.distributed.checkpoint writes last."""
    return (checkpoint / CHECKPOINT_METADATA).is_file()


def write_manifest(checkpoint: Path, step: int, of_pass: Path) -> None:
    """Write the sizes of a checkpoint's files, once its save has returned on all ranks.

    Called on one rank, for the folder of its pass. A checkpoint without metadata gets no manifest.
    """
    if not has_metadata(checkpoint):
        return
    sizes = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir())}
    path = of_pass / STATE / manifest_name(step)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"schema": SCHEMA, "files": sizes})


def set_torn_aside(run_folder: Path) -> tuple[int, ...]:
    """Move a run's torn checkpoints to ``torn/``; return their steps. No process may be using them.

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


def newest_whole(run_folder: Path) -> int | None:
    """Step of a run's newest complete checkpoint; None if there is none."""
    found = (
        (checkpoint, int(named[1]))
        for checkpoint in (run_folder / CHECKPOINTS).glob("step-*")
        if (named := _STEP.fullmatch(checkpoint.name))
    )
    return max((step for path, step in found if is_whole(run_folder, path, step)), default=None)


def is_whole(run_folder: Path, checkpoint: Path, step: int) -> bool:
    """Whether a checkpoint is complete, as far as file sizes show.

    It has metadata, and its files have the sizes in the manifest of the last pass that saved its
    step.
    """
    sizes = _sizes(run_folder, step)
    if sizes is None or not has_metadata(checkpoint):
        return False
    try:
        return all((checkpoint / name).stat().st_size >= size for name, size in sizes.items())
    except FileNotFoundError:
        return False


def _sizes(run_folder: Path, step: int) -> dict[str, int] | None:
    """File sizes from the last pass that saved the step; None if the save did not return."""
    for of_pass in reversed(pass_folders(run_folder)):
        state = of_pass / STATE
        if not (state / arrays_name(SAVED, step)).is_file():
            continue
        path = state / manifest_name(step)
        try:
            parsed = json.loads(path.read_bytes())
            return dict(upgraded(path.name, parsed)["files"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SchemaError):
            return None
    return None


def _free(path: Path) -> Path:
    """The path, or if it exists, the path with a number."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free
