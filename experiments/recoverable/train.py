"""A small language model under DDP that may be stopped, killed, and resumed on other ranks.

torchrun --nproc-per-node 2 train.py --checkpoints FOLDER

As TorchElastic's documentation has it: load the newest checkpoint, train, and save everything that
the next step depends on. What people forget of that is in mistakes.py (docs/resumes.md).
"""

from __future__ import annotations

import argparse
import math
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and its defaults keep the process group
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from converge_harness.probe import Probe

VOCAB, WIDTH, LENGTH = 97, 64, 32


class Training:
    """One rank from its start until it ends, stops or dies."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.step, self.told_to_stop = args, 0, False
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        dice = torch.Generator().manual_seed(args.seed)
        start, stride = torch.randint(1, VOCAB, (2, args.samples, 1), generator=dice)
        self.samples = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
        torch.manual_seed(args.seed)  # the same initial weights on every rank
        hidden = (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(args.dropout))
        layers = (nn.Embedding(VOCAB, WIDTH), *hidden, nn.Linear(4 * WIDTH, VOCAB))
        self.model = self.wrapped(nn.Sequential(*layers))
        torch.manual_seed(args.seed + 1 + self.rank)  # and dropout masks of its own
        layers[-1].register_buffer("usual_loss", torch.zeros(()))  # by which a spike is noticed
        self.usual_loss = layers[-1].usual_loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = LambdaLR(self.optimizer, self.rate)
        self.probe = Probe.from_env(self.model, self.optimizer, schedule=self.schedule)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model as ranks share it."""
        return DistributedDataParallel(model)

    def rate(self, steps: int) -> float:
        """Share of the learning rate after so many steps: a warm-up, then a linear decay."""
        return min((steps + 1) / 4, 1 - steps / (self.args.steps + 1))

    def batch(self, step: int) -> torch.Tensor:
        """The global batch of a step, however many ranks there are; epochs are shuffled."""
        epoch, index = divmod(step - 1, self.steps_of_epoch())
        dice = torch.Generator().manual_seed(1000 * self.args.seed + epoch)
        order = torch.randperm(self.args.samples, generator=dice)
        return self.samples[order.split(self.args.global_batch)[index]]

    def steps_of_epoch(self) -> int:
        """The last batch of an epoch has the samples that are left."""
        return math.ceil(self.args.samples / self.args.global_batch)

    def train(self) -> None:
        """From the newest checkpoint, if there is one."""
        signal.signal(signal.SIGTERM, self.on_sigterm)
        newest = self.newest()
        if newest is not None:
            self.load(newest)
        self.probe.loaded(self.step)
        while self.step < self.args.stop_at and not self.told_to_stop:
            self.train_step()
            self.told_to_stop = self.any_rank(self.told_to_stop)
            due = self.step % self.args.every == 0 or self.step == self.args.stop_at
            if due or self.told_to_stop:
                self.save()

    def train_step(self) -> None:
        """One update, by the mean gradient of the global batch."""
        self.step += 1
        mine = self.batch(self.step)[self.rank :: self.ranks]
        microbatches = mine.split(self.args.micro_batch)
        total = torch.zeros(())
        for microbatch in microbatches:
            inputs, labels = microbatch[:, :-1], microbatch[:, 1:]
            self.probe.batch(inputs, labels)
            logits = self.model(inputs).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten())
            (loss / self.divisor(len(microbatches))).backward()
            total += loss.detach() / len(microbatches)
        norm = self.clip()
        self.optimizer.step()
        self.schedule.step()
        dist.all_reduce(total)
        self.usual_loss.lerp_(total / self.ranks, 0.1)
        self.probe.step(loss=total / self.ranks, grad_norm=norm)
        self.optimizer.zero_grad()

    def divisor(self, microbatches: int) -> int:
        """Of a microbatch's loss; DDP divides by the number of ranks."""
        return microbatches

    def clip(self) -> torch.Tensor:
        """Limit the gradients' norm. Raises if it is not finite, so there is no update."""
        parameters = self.model.parameters()
        return nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)

    def parts(self) -> dict[str, Any]:
        """What has a state, by its name in a checkpoint."""
        return {
            "model": self.model.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def save(self) -> None:
        """Write a checkpoint; every rank gives the state of its random numbers."""
        random: list[Any] = [None] * self.ranks
        dist.all_gather_object(random, torch.get_rng_state())
        if self.rank == 0:
            states = {name: part.state_dict() for name, part in self.parts().items()}
            self.write({"step": self.step, "random": random, **states}, self.path())
        self.probe.saved(self.step)

    def path(self) -> Path:
        """The file of this step's checkpoint."""
        return self.args.checkpoints / f"step-{self.step}.pt"

    def newest(self) -> Path | None:
        """The file of the newest checkpoint."""
        found = {int(path.stem[5:]): path for path in self.args.checkpoints.glob("step-*.pt")}
        return found[max(found)] if found else None

    def write(self, states: dict[str, Any], path: Path) -> None:
        """Write the file of a checkpoint so that whoever finds it finds all of it."""
        half = path.with_suffix(".tmp")
        torch.save(states, half)
        half.rename(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, which ranks of another number may have written."""
        states = torch.load(path, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(states[name])
        self.step = states["step"]
        self.restore_random(states["random"])

    def restore_random(self, states: list[torch.Tensor]) -> None:
        """Draw what would have been drawn; a rank that was not there before has drawn nothing."""
        if self.rank < len(states):
            torch.set_rng_state(states[self.rank])

    def on_sigterm(self, *_: object) -> None:
        """Stop after the step; the time until SIGKILL is enough for that."""
        self.told_to_stop = True

    def any_rank(self, mine: bool) -> bool:  # noqa: FBT001
        """Whether it holds on some rank: all have to stop after the same step."""
        flag = torch.tensor(float(mine))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def arguments() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stop-at", type=int, default=12, help="the last step of this start")
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=48, help="in an epoch")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    return parser


def main(kind: type[Training], args: argparse.Namespace) -> None:
    """Train in this rank."""
    dist.init_process_group("gloo")
    kind(args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Training, arguments().parse_args())
