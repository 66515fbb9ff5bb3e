"""Passes of a run that is resumed on purpose: each leaves its evidence in a folder of its own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.rank.torn import set_torn_aside
from harness.rank.writer import SupersededError


@dataclass(frozen=True, slots=True)
class Pass:
    """One life of a run's ranks, from a start or resume to its end."""

    number: int
    """From 1, in the order of the starts."""
    folder: Path
    """``passes/NNN`` in the run folder."""

    def require_newest(self) -> None:
        """Raise SupersededError when a later pass has begun.

        A scheduler that has lost a node starts its job again elsewhere, and ranks that live on
        there unseen must not write into checkpoints that others load.
        """
        newest = _newest(self.folder.parent)
        if newest > self.number:
            raise SupersededError(
                f"pass {newest} of this run has begun elsewhere, so this one, pass {self.number}, "
                "writes no checkpoint any more"
            )


def begin_pass(run_folder: Path, *, requeued: bool = False) -> Pass:
    """Make the folder of the next pass. Collective over the world.

    No two lives get the same one, even if they begin at the same time.

    Args:
        run_folder: of the job.
        requeued: whether a scheduler starts the job again, so that nobody but its ranks sets
            torn checkpoints aside.
    """
    found: list[int] = [0]
    if dist.get_rank() == 0:
        found = [_claim(run_folder / "passes")]
        if requeued:
            set_torn_aside(run_folder)
    dist.broadcast_object_list(found, src=0)
    return Pass(found[0], _folder(run_folder / "passes", found[0]))


def _claim(passes: Path) -> int:
    """Make the folder of a number that nobody has; to make a folder is atomic, on NFS too."""
    passes.mkdir(parents=True, exist_ok=True)
    number = _newest(passes)
    while True:
        number += 1  # not looked up again: a network file system may list an older state
        with suppress(FileExistsError):
            _folder(passes, number).mkdir()
            return number


def _newest(passes: Path) -> int:
    return max((int(folder.name) for folder in passes.iterdir()), default=0)


def _folder(passes: Path, number: int) -> Path:
    return passes / f"{number:03d}"
