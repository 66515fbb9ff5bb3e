"""How long the files of a whole checkpoint are, so that a torn one can be told from it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from harness.rank.writer import SCHEMA, write_json


def write_manifest(checkpoint: Path, step: int, state: Path) -> None:
    """Leave ``saved-step-N.json`` with the sizes of a saved checkpoint's files, in bytes.

    Call it on every rank once the save has returned: then, on rank 0, it is whole, or none.
    ``state`` is the pass's folder for the evidence of checkpoints.
    """
    if dist.get_rank() != 0 or not (checkpoint / ".metadata").is_file():
        return
    sizes = {path.name: path.stat().st_size for path in sorted(checkpoint.iterdir())}
    state.mkdir(exist_ok=True)
    write_json(state / f"saved-step-{step:08d}.json", {"schema": SCHEMA, "files": sizes})
