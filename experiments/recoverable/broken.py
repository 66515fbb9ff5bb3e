"""Programs that cannot be resumed at all, each as one changed method of train.py.

MISTAKE=ignores_checkpoint torchrun --nproc-per-node 2 broken.py --checkpoints FOLDER

What converge says of each is in recoverable_broken.toml. In mistakes.py the program is resumed, and
loses something.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train import Training, arguments, main


class IgnoresCheckpoint(Training):
    """It starts over whatever is there, and says so."""

    def load(self, path: Path) -> None:
        del path


class CountsOneStepLess(Training):
    """It loads the checkpoint of a step, and takes it for that of the step before."""

    def load(self, path: Path) -> None:
        super().load(path)
        self.step -= 1


class NeverWhole(Training):
    """The file gets its name in a last step, which is missing."""

    def write(self, states: dict[str, Any], path: Path) -> None:
        torch.save(states, path.with_suffix(".tmp"))


class SlowToStop(Training):
    """It takes longer to stop than torchrun waits before SIGKILL, and saves nothing until then."""

    def any_rank(self, mine: bool) -> bool:  # noqa: FBT001
        stop = super().any_rank(mine)
        if stop:
            time.sleep(600)
        return stop


class EndsEarly(Training):
    """After a resume it ends with exit code 0, as if all had been done."""

    def load(self, path: Path) -> None:
        super().load(path)
        sys.exit(0)


class FixedRanks(Training):
    """It runs on two ranks only."""

    def train(self) -> None:
        if self.ranks != 2:  # noqa: PLR2004
            raise ValueError(f"this program needs 2 ranks, not {self.ranks}")
        super().train()


class TakenPort(Training):
    """It opens a port of its own, which another process has."""

    def train(self) -> None:
        if self.rank == 0:
            other = socket.create_server(("127.0.0.1", 0))
            socket.create_server(other.getsockname())
        super().train()


BROKEN = {
    "ignores_checkpoint": IgnoresCheckpoint,
    "counts_one_step_less": CountsOneStepLess,
    "never_whole": NeverWhole,
    "slow_to_stop": SlowToStop,
    "ends_early": EndsEarly,
    "fixed_ranks": FixedRanks,
    "taken_port": TakenPort,
}

if __name__ == "__main__":
    main(BROKEN[os.environ["MISTAKE"]], arguments().parse_args())
