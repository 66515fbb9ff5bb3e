"""A judged matrix as runs that other tools draw: TensorBoard, Weights & Biases."""

from harness.export.curves import ExportedRun, Points, exported
from harness.export.tensorboard_runs import write_tensorboard
from harness.export.wandb_runs import write_wandb

__all__ = ["ExportedRun", "Points", "exported", "write_tensorboard", "write_wandb"]
