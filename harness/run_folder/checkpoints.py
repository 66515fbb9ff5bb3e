"""Where a run's checkpoints are and which are complete; sets torn ones aside before ranks restart.

torchtitan assumes that the newest checkpoint with ``.metadata`` is complete. A node that dies may
leave one whose save had not returned, or whose shards never reached the disk. So ranks write a
manifest once a save has returned: the sizes of the checkpoint's files at that time. Of a program
that overwrites one file, the newest manifest says of which step it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
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

STEP = "{step}"
"""In the name of a checkpoint, its step."""


class TornCheckpointError(Exception):
    """A torn checkpoint cannot be set aside."""


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """What a program's checkpoints look like; the defaults are those of our own ranks."""

    name: str = f"step-{STEP}"
    """Name of the file or folder of a step's checkpoint, in the run folder's ``checkpoint``.
    Without ``{step}`` it is one file, which every save overwrites.
    """
    last_file: str | None = CHECKPOINT_METADATA
    """The file of such a folder that is written last; None: nothing but the sizes of its files
    tells a complete checkpoint from half of one.
    """

    @property
    def is_overwritten(self) -> bool:
        """Whether all checkpoints are written to one file, so that only the last one is there."""
        return STEP not in self.name

    def path(self, run_folder: Path, step: int) -> Path:
        """The path of a step's checkpoint, which need not exist."""
        return run_folder / CHECKPOINTS / self.name.replace(STEP, str(step))

    def found(self, run_folder: Path) -> Iterator[tuple[int, Path]]:
        """Step and path of every checkpoint that is there, complete or not, sorted by path.

        One file that is overwritten has the step of the last save that returned; 0 if none has.
        """
        if self.is_overwritten:
            step = _last_saved(run_folder)
            if (path := self.path(run_folder, step)).exists():
                yield step, path
            return
        before, _, after = self.name.partition(STEP)
        named = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
        for path in sorted((run_folder / CHECKPOINTS).glob("*")):
            match = named.fullmatch(path.name)
            if match and path == self.path(run_folder, int(match[1])):
                yield int(match[1]), path

    def is_finished(self, checkpoint: Path) -> bool:
        """Whether a checkpoint exists, with the file that is written last."""
        if self.is_overwritten:
            return checkpoint.is_file()
        if self.last_file is None:
            return checkpoint.exists()
        return (checkpoint / self.last_file).is_file()


OUR_FORM = CheckpointForm()
"""Of torchtitan, by torch.distributed.checkpoint."""


def has_metadata(checkpoint: Path) -> bool:
    """Whether a checkpoint has metadata, which torch.distributed.checkpoint writes last."""
    return (checkpoint / CHECKPOINT_METADATA).is_file()


def write_manifest(
    checkpoint: Path, step: int, of_pass: Path, form: CheckpointForm = OUR_FORM
) -> None:
    """Write the sizes of a checkpoint's files, once its save has returned on all ranks.

    Called on one rank, for the folder of its pass. An unfinished checkpoint gets no manifest.
    """
    if not form.is_finished(checkpoint):
        return
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    if checkpoint.is_file():
        sizes = {_ITSELF: checkpoint.stat().st_size}
    path = of_pass / STATE / manifest_name(step)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"schema": SCHEMA, "files": sizes})


_ITSELF = "."
"""In a manifest, the name of a checkpoint that is one file."""


def set_torn_aside(run_folder: Path, form: CheckpointForm = OUR_FORM) -> tuple[int, ...]:
    """Move a run's torn checkpoints to ``torn/``; return their steps. No process may be using them.

    Of a file that is overwritten, the step is the last that was complete in it (0: none was).

    Raises TornCheckpointError when one cannot be moved.
    """
    torn = []
    for step, checkpoint in form.found(run_folder):
        if is_whole(run_folder, step, form):
            continue
        try:
            (run_folder / TORN).mkdir(exist_ok=True)
            checkpoint.rename(_free(run_folder / TORN / checkpoint.name))
        except OSError as error:
            raise TornCheckpointError(
                f"{checkpoint}: cannot set the torn checkpoint aside: {error}"
            ) from error
        torn.append(step)
    return tuple(torn)


def newest_whole(run_folder: Path, form: CheckpointForm = OUR_FORM) -> int | None:
    """Step of a run's newest complete checkpoint; None if there is none."""
    found = (step for step, _ in form.found(run_folder) if is_whole(run_folder, step, form))
    return max(found, default=None)


def is_whole(run_folder: Path, step: int, form: CheckpointForm = OUR_FORM) -> bool:
    """Whether the checkpoint of a step is complete, as far as file sizes show.

    It is finished, and its files have the sizes in the manifest of the last pass that saved its
    step. A file that is overwritten may be complete and of a later step, if its rank died before
    the save returned: nothing tells the two apart.
    """
    if form.is_overwritten and step != _last_saved(run_folder):
        return False
    checkpoint = form.path(run_folder, step)
    sizes = _sizes(run_folder, step)
    if sizes is None or not form.is_finished(checkpoint):
        return False
    try:
        return all((checkpoint / name).stat().st_size >= size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError):
        return False


def manifests(of_pass: Path) -> dict[int, Path]:
    """By step, in order, the manifest of every checkpoint whose save returned in a pass."""
    prefix = f"{SAVED}-"
    paths = (of_pass / STATE).glob(f"{prefix}*.json")
    steps = {path.stem.removeprefix(prefix): path for path in paths}
    return dict(sorted((int(step), path) for step, path in steps.items() if step.isdecimal()))


def _last_saved(run_folder: Path) -> int:
    """Step of the last save of a run that returned; 0 if none has."""
    for of_pass in reversed(pass_folders(run_folder)):
        if saved := manifests(of_pass):
            return max(saved)
    return 0


def _sizes(run_folder: Path, step: int) -> dict[str, int] | None:
    """File sizes from the last pass that saved the step; None if the save did not return."""
    for of_pass in reversed(pass_folders(run_folder)):
        state = of_pass / STATE
        path = state / manifest_name(step)
        # A program without the probe leaves no arrays, and converge writes the manifest itself.
        if not (state / arrays_name(SAVED, step)).is_file() and not path.is_file():
            continue
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
