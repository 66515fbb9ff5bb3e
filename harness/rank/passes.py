"""Passes of a run that is resumed on purpose: each leaves its evidence in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from harness.run_folder.checkpoints import set_torn_aside
from harness.run_folder.passes import PassFolder, claim_pass, pass_folder


def begin_pass(run_folder: Path, *, requeued: bool = False) -> PassFolder:
    """Make the folder of the next pass. Collective over the world.

    No two lives get the same one, even if they begin at the same time.

    Args:
        run_folder: of the job.
        requeued: whether a scheduler starts the job again, so that nobody but its ranks sets
            torn checkpoints aside.
    """
    found: list[int] = [0]
    if dist.get_rank() == 0:
        found = [claim_pass(run_folder)]
        if requeued:
            set_torn_aside(run_folder)
    dist.broadcast_object_list(found, src=0)
    return PassFolder(found[0], pass_folder(run_folder, found[0]))
