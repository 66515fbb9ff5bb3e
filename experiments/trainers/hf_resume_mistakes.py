"""What people get wrong about Trainer when it is resumed on other ranks, one change each.

MISTAKE=data_not_skipped torchrun --nproc-per-node 2 hf_resume_mistakes.py --data DATA …

None of them raises an error, and none shows before the first resume.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_resume import Training, arguments
from hf_train import ProbedTrainer


class DataNotSkipped(Training):
    """``ignore_data_skip``, because skipping took long: the epoch starts over."""

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"ignore_data_skip": True}


class ModelAlone(Training):
    """``save_only_model``, because checkpoints were large: there is no optimizer to load."""

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"save_only_model": True}


class _WithoutSchedule(ProbedTrainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            (Path(output_dir) / "scheduler.pt").unlink()


class ScheduleNotKept(Training):
    """Checkpoints without ``scheduler.pt``: then Trainer does not load the optimizer, either."""

    trainer = _WithoutSchedule


class AccumulationKept(Training):
    """The batch size of a rank and the accumulation stay as they were on two ranks."""

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"gradient_accumulation_steps": 1}


class ScheduleByRanks(Training):
    """The length of training is computed from batch size and ranks, and not from accumulation."""

    def settings(self) -> dict[str, Any]:
        # All samples divided by those of a microbatch on all ranks: microbatches, and not updates.
        return super().settings() | {"max_steps": self.options.steps * self.options.accumulate}


MISTAKES: dict[str, type[Training]] = {
    "data_not_skipped": DataNotSkipped,
    "model_alone": ModelAlone,
    "schedule_not_kept": ScheduleNotKept,
    "accumulation_kept": AccumulationKept,
    "schedule_by_ranks": ScheduleByRanks,
}

if __name__ == "__main__":
    MISTAKES[os.environ["MISTAKE"]](arguments().parse_args()).train()
