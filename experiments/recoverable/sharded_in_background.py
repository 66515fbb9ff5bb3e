"""The script of sharded.py, which trains on while its checkpoints are written (async_save).

torchrun --nproc-per-node 2 sharded_in_background.py --checkpoints FOLDER
"""

from __future__ import annotations

import argparse
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded import Sharded, arguments
from train import main


class InBackground(Sharded):
    """One checkpoint is written at a time, and the last is complete when the script ends."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.writing: Future[Any] | None = None
        self.writers = dist.new_group()  # so as not to disturb the collectives of training
        super().__init__(args)

    def train(self) -> None:
        super().train()
        self.wait()

    def save(self) -> None:
        """Copy the states, and write them in another thread."""
        self.wait()
        self.writing = dcp.async_save(
            self.states(), checkpoint_id=self.path(), process_group=self.writers
        )
        self.probe.saved(self.step, written=self.writing)

    def wait(self) -> None:
        """Until a checkpoint that is under way is complete. Raises what its writing raised."""
        if self.writing is not None:
            self.writing.result()


if __name__ == "__main__":
    main(InBackground, arguments().parse_args())
