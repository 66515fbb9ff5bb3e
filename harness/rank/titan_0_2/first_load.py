"""From which checkpoint a trainer of torchtitan 0.2 starts when none of its own is whole."""

from __future__ import annotations

import functools
from typing import Any


def fall_back_to_initial_load(checkpointer: Any) -> None:
    """Load ``checkpoint.initial_load_path`` also when the checkpoint folder holds no whole one.

    torchtitan 0.2.2 looks there only when the folder does not exist (components/checkpoint.py,
    ``load``). After death in the middle of the first save it loads nothing at all, says nothing,
    and trains on from random weights; 0.3.0 falls back as this does.
    """
    load = checkpointer.load

    @functools.wraps(load)
    def load_or_start(step: int = -1) -> Any:
        if step != -1 or checkpointer._find_load_step() != -1:
            return load(step)
        folder = checkpointer.folder
        checkpointer.folder = f"{folder}/none"  # does not exist
        try:
            return load(step)
        finally:
            checkpointer.folder = folder

    checkpointer.load = load_or_start
