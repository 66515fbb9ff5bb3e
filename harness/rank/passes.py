"""Passes of a run that is resumed on purpose: each leaves its evidence in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Pass:
    """One life of a run's ranks, from a start or resume to its end."""

    number: int
    """From 1, in the order of the starts."""
    folder: Path
    """``passes/NNN`` in the run folder."""


def begin_pass(run_folder: Path) -> Pass:
    """Make the folder of the next pass. Collective over the world.

    Raises FileExistsError on rank 0 when the ranks of another pass do the same at the same time.
    """
    found: list[int] = [0]
    if dist.get_rank() == 0:
        passes = run_folder / "passes"
        passes.mkdir(parents=True, exist_ok=True)
        found = [1 + max((int(folder.name) for folder in passes.iterdir()), default=0)]
        _folder(run_folder, found[0]).mkdir()
    dist.broadcast_object_list(found, src=0)
    return Pass(found[0], _folder(run_folder, found[0]))


def _folder(run_folder: Path, number: int) -> Path:
    return run_folder / "passes" / f"{number:03d}"
