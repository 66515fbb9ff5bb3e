"""transformers.Trainer with its own checkpoints, stopped, killed, and resumed on other ranks.

torchrun --nproc-per-node 2 hf_resume.py --data DATA --checkpoints FOLDER --batch 4 --accumulate 1

What people get wrong about it is in hf_resume_mistakes.py (docs/resumes.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from documents import Documents
from hf_train import ProbedTrainer, tiny_llama
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class StopAfter(TrainerCallback):
    """Saves and ends after a step. ``max_steps`` would do that, too, and shorten the schedule."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


class Stream(torch.utils.data.IterableDataset):
    """The same samples, in their order. It does not say how many there are."""

    def __init__(self, samples: Documents) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))


class Training:
    """One start of training, from the newest checkpoint, if there is one."""

    trainer: type[ProbedTrainer] = ProbedTrainer

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def settings(self) -> dict[str, Any]:
        """Arguments of Trainer; batch size x accumulation x ranks is the same after a resize."""
        return {
            "output_dir": str(self.options.checkpoints),
            "max_steps": self.options.steps,
            "per_device_train_batch_size": self.options.batch,
            "gradient_accumulation_steps": self.options.accumulate,
            "learning_rate": 2e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 3,
            "max_grad_norm": 0.5,
            "seed": self.options.seed,
            "logging_steps": 1,
            "save_steps": self.options.every,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }

    def train(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(self.options.seed)
        data = Documents(self.options.data, self.options.seq_len, self.options.samples)
        model = tiny_llama(data.vocabulary, self.options.seq_len, self.options.dropout)
        trainer = self.trainer(
            model=model,
            args=TrainingArguments(**self.settings()),
            train_dataset=Stream(data) if self.options.streamed else data,
            callbacks=[StopAfter(self.options.stop_at)],
        )
        checkpoint = get_last_checkpoint(str(self.options.checkpoints))
        trainer.train(resume_from_checkpoint=checkpoint)


def arguments() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    for name in ("batch", "accumulate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-at", type=int, default=12, help="the last step of this start")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--samples", type=int, default=48, help="in an epoch")
    parser.add_argument("--streamed", type=json.loads, default=False, help="true or false")
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser


if __name__ == "__main__":
    Training(arguments().parse_args()).train()
