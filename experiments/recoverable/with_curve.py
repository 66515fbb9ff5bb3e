"""The same script without the probe: it writes a curve, and nothing else shows what it did.

MISTAKE=none torchrun --nproc-per-node 2 with_curve.py --checkpoints FOLDER

$CURVE is the file of this start alone; each row has the step's number in the whole training.
$PAUSE makes every step as many seconds longer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mistakes import MISTAKES
from train import Training, arguments, main


class Curve:
    """In the place of the probe: a CSV file of the steps of this start, written by rank 0."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.file = None
        if dist.get_rank() == 0:
            self.file = Path(os.environ["CURVE"]).open("w", encoding="utf-8")  # noqa: SIM115
            self.write("step,loss,grad_norm,lr")

    def write(self, row: str) -> None:
        """One line, at once: whoever reads the file finds every step that has ended."""
        if self.file is not None:
            print(row, file=self.file, flush=True)

    def step(self, *, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """A row of the step that has ended, with the learning rate of the next."""
        training = self.training
        (rate,) = training.schedule.get_last_lr()
        self.write(f"{training.step},{loss.item()!r},{grad_norm.item()!r},{rate!r}")
        time.sleep(float(os.environ["PAUSE"]))

    def batch(self, *_: object) -> None:
        """What only the probe looks at."""

    loaded = saved = batch


class CheckpointIgnored(Training):
    """Nobody thinks of the checkpoint: every start begins at step 1."""

    def load(self, path: Path) -> None:
        del path


def with_curve(kind: type[Training]) -> type[Training]:
    """A way to train, with a curve instead of the probe."""

    class WithCurve(kind):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            self.probe = Curve(self)

    return WithCurve


if __name__ == "__main__":
    kinds = {"none": Training, "checkpoint_ignored": CheckpointIgnored, **MISTAKES}
    main(with_curve(kinds[os.environ["MISTAKE"]]), arguments().parse_args())
