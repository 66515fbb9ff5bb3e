"""Composer with a StreamingDataset and sharded checkpoints, resumed on other ranks.

torchrun --nproc-per-node 2 composer_resume.py --data DATA --output OUT --checkpoints FOLDER

What people get wrong about it is in composer_resume_mistakes.py (docs/resumes.md).
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import streaming
import torch
from composer import Callback, DataSpec, Logger, State, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import CheckpointSaver
from composer.optim import LinearScheduler
from composer.utils import dist
from composer_train import LanguageModel, Probed, tokens_of
from documents import Documents
from streaming.base import dataset as streaming_dataset
from streaming.base.shared import prefix as streaming_prefix
from torch.utils.data import DataLoader

from converge_harness.probe import Probe


class ProbedResume(Probed):
    """Tells the probe what was loaded and saved, too. In callbacks it stands after the saver."""

    started = False

    def fit_start(self, _state: State, _logger: Logger) -> None:
        """Nothing: Composer restores random states after this event."""

    def batch_start(self, state: State, _logger: Logger) -> None:
        if not self.started:
            self.started = True
            (optimizer,), (schedule,) = state.optimizers, state.schedulers
            self.probe = Probe.from_env(state.model, optimizer, schedule=schedule)
            self.probe.loaded(int(state.timestamp.batch))

    def batch_checkpoint(self, state: State, _logger: Logger) -> None:
        (saver,) = (each for each in state.callbacks if isinstance(each, CheckpointSaver))
        if saver.last_checkpoint_batch == state.timestamp.batch:
            self.probe.saved(int(state.timestamp.batch))


class StopAfter(Callback):
    """Saves and ends after a step. ``max_duration`` would shorten the schedule, too."""

    def __init__(self, step: int) -> None:
        self.step = step

    def batch_end(self, state: State, _logger: Logger) -> None:
        if state.timestamp.batch == self.step:
            state.stop_training()


def take_a_node_each() -> None:
    """Make this rank a node of its own, as far as Composer and Streaming can see."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": os.environ["RANK"]}


def name_shared_memory() -> None:
    """Let names in /dev/shm begin with a word that only ranks of this start, on this node, have.

    Streaming takes the first free number, which other jobs on this machine, and simulated nodes,
    may take at the same moment. Collective.
    """
    words = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(words)
    word = f"{words[0]}-{os.environ.get('NODE_RANK', '0')}"
    for module in (streaming_prefix, streaming_dataset):
        module._get_path = lambda number, name: f"{word}-{number:06}_{name}"  # noqa: SLF001


def write_shards(samples: Documents, folder: Path) -> None:
    """Write samples as Streaming's shards, if no earlier start did. Collective."""
    if dist.get_global_rank() == 0 and not folder.exists():
        half = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
        columns = {"input_ids": "ndarray:int64", "labels": "ndarray:int64"}
        with streaming.MDSWriter(out=str(half), columns=columns) as writer:
            for index in range(len(samples)):
                writer.write({name: np.array(each) for name, each in samples[index].items()})
        half.rename(folder)
    dist.barrier()


class Training:
    """One start of training, from the newest checkpoint, if there is one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def batch(self) -> int:
        """Samples of a rank in each step; those of all ranks are the same after a resize."""
        return self.options.global_batch // dist.get_world_size()

    def loader(self, shards: Path) -> DataLoader:
        dataset = streaming.StreamingDataset(
            local=str(shards),
            num_canonical_nodes=self.options.canonical_nodes or None,
            shuffle=True,
            batch_size=self.batch(),
        )
        return DataLoader(dataset, batch_size=self.batch(), num_workers=self.options.workers)

    def saver(self) -> CheckpointSaver:
        # Sharded checkpoints are in a folder ep{epoch}-ba{batch}, beside the named file.
        return CheckpointSaver(
            folder=str(self.options.checkpoints),
            filename="ba{batch}/{rank}.pt",
            save_interval=f"{self.options.every}ba",
        )

    def newest(self) -> str | None:
        """The newest checkpoint whose last file was written."""
        found = {
            int(each.parts[-3].removeprefix("ba")): str(each.parent)
            for each in self.options.checkpoints.glob("ba*/*/.metadata")
        }
        return found[max(found)] if found else None

    def settings(self) -> dict[str, Any]:
        """Arguments of Trainer beside model, data, optimizer and callbacks."""
        return {
            "max_duration": f"{self.options.steps}ba",
            "schedulers": LinearScheduler(alpha_f=0.1),
            "load_path": self.newest(),
            "load_ignore_keys": [self.options.ignored] if self.options.ignored else None,
            "run_name": "converge",
            "parallelism_config": {"fsdp": {"state_dict_type": "sharded"}},
            "device_train_microbatch_size": self.options.microbatch,
            "accumulate_train_batch_on_tokens": True,
            "algorithms": GradientClipping("norm", 1.0),
            "device": "cpu",
            "precision": "fp32",
            "seed": self.options.seed,
            "progress_bar": False,
        }

    def train(self) -> None:
        options = self.options
        os.environ["FSDP_VERSION"] = "2"  # FSDP 1 takes a GPU for granted
        if options.a_node_each:
            take_a_node_each()
        dist.initialize_dist("cpu")
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        name_shared_memory()
        samples = Documents(options.data, options.seq_len, options.samples)
        shards = options.output / "shards"
        write_shards(samples, shards)
        model = LanguageModel(samples.vocabulary, options.seq_len, options.dropout)
        Trainer(
            model=model,
            train_dataloader=DataSpec(self.loader(shards), get_num_tokens_in_batch=tokens_of),
            optimizers=torch.optim.AdamW(model.parameters(), lr=2e-3),
            callbacks=[StopAfter(options.stop_at), self.saver(), ProbedResume("total")],
            **self.settings(),
        ).fit()


def arguments() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    for name in ("data", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-at", type=int, default=12, help="the last step of this start")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--samples", type=int, default=48, help="in an epoch")
    parser.add_argument("--canonical-nodes", type=int, default=2, help="0: Streaming chooses")
    parser.add_argument("--a-node-each", type=json.loads, default=False, help="true or false")
    parser.add_argument("--workers", type=int, default=0, help="of each rank's DataLoader")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--ignored", default="", help="keys of a checkpoint that are not loaded")
    return parser


if __name__ == "__main__":
    Training(arguments().parse_args()).train()
