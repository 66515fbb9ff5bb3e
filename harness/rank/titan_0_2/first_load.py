"""From which checkpoint a trainer of torchtitan 0.2 starts when none of its own is whole."""

from __future__ import annotations

import functools
from typing import Any


def fall_back_to_initial_load() -> None:
    """Load ``checkpoint.initial_load_path`` also when the checkpoint folder holds no whole one.

    torchtitan 0.2.2 looks there only when the folder does not exist (components/checkpoint.py,
    ``load``): after death in the middle of the first save it loads nothing at all. 0.3.0 falls
    back as this does.
    """
    from torchtitan.components.checkpoint import CheckpointManager

    load = CheckpointManager.load

    @functools.wraps(load)
    def load_or_start(checkpointer: Any, step: int = -1) -> Any:
        if step != -1 or checkpointer._find_load_step() != -1:
            return load(checkpointer, step)
        folder = checkpointer.folder
        checkpointer.folder = f"{folder}/none"  # does not exist
        try:
            return load(checkpointer, step)
        finally:
            checkpointer.folder = folder

    CheckpointManager.load = load_or_start
