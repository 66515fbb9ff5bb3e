"""What people forget when they shard a script, each as one or two changed methods.

MISTAKE=optimizer_not_saved torchrun --nproc-per-node 2 sharded_mistakes.py --checkpoints FOLDER

The first three do not show before the first resume or fault, the others do not where a rank takes
one microbatch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sharded import Sharded, arguments
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from train import main


class OptimizerNotSaved(Sharded):
    """AdamW's moments and step counts start over."""

    def states(self) -> dict[str, Any]:
        return {name: state for name, state in super().states().items() if name != "optimizer"}

    def restore(self, states: dict[str, Any]) -> None:
        set_model_state_dict(self.model, states["model"])
        self.schedule.load_state_dict(states["schedule"])
        self.step = states["step"]


class HalfTaken(Sharded):
    """The newest folder is loaded, whether or not its .metadata was written."""

    def newest(self) -> Path | None:
        folders = self.args.checkpoints.glob("step-*")
        return max(folders, key=lambda path: int(path.name[5:]), default=None)


class OneRandomState(Sharded):
    """All ranks save their random numbers under one name, so that those of one rank are written."""

    def name_of_random(self) -> str:
        return "random"


class NotDivided(Sharded):
    """Gradients of microbatches are added up and not divided by their number."""

    def divisor(self, microbatches: int) -> int:
        del microbatches
        return 1


class LastAlone(Sharded):
    """Gradients are dropped before each microbatch, so that the last one alone counts."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda *_: self.optimizer.zero_grad())
        return super().wrapped(model)


MISTAKES: dict[str, type[Sharded]] = {
    "optimizer_not_saved": OptimizerNotSaved,
    "half_taken": HalfTaken,
    "one_random_state": OneRandomState,
    "not_divided": NotDivided,
    "last_alone": LastAlone,
}

if __name__ == "__main__":
    main(MISTAKES[os.environ["MISTAKE"]], arguments().parse_args())
