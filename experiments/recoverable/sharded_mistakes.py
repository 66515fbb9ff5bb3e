"""What people forget when they save distributed checkpoints, each as one or two changed methods.

MISTAKE=optimizer_not_saved torchrun --nproc-per-node 2 sharded_mistakes.py --checkpoints FOLDER

None of them shows before the first resume or fault.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sharded import Sharded
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from train import arguments, main


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


MISTAKES: dict[str, type[Sharded]] = {
    "optimizer_not_saved": OptimizerNotSaved,
    "half_taken": HalfTaken,
    "one_random_state": OneRandomState,
}

if __name__ == "__main__":
    main(MISTAKES[os.environ["MISTAKE"]], arguments().parse_args())
