"""A program whose model has parameters of two types, and one way of going wrong at a time.

Matrices are stored in bfloat16 and norms in float32, as many models are trained: a norm's weights
are near one, where steps of bfloat16 are larger than what an optimizer moves them by.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe

WORDS, WIDTH, LENGTH = 64, 64, 16


class Block(nn.Module):
    """A norm in float32 before two matrices in bfloat16."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.float32)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.bfloat16, bias=False)

    def forward(self, hidden):
        normed = self.norm(hidden.float()).to(hidden.dtype)
        return hidden + self.down(functional.silu(self.up(normed)))


class Model(nn.Module):
    """Blocks between an embedding and an output layer, both in bfloat16."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.RMSNorm(WIDTH, dtype=torch.float32)
        self.output = nn.Linear(WIDTH, WORDS, dtype=torch.bfloat16, bias=False)

    def forward(self, tokens):
        hidden = self.blocks(self.embedding(tokens))
        return self.output(self.norm(hidden.float()).to(hidden.dtype)).float()


def samples(seed, step, size):
    """The global batch of a step: it follows from the seed and the step alone."""
    numbers = torch.Generator().manual_seed(1000 * seed + step)
    first = torch.randint(0, WORDS, (size, 1), generator=numbers)
    stride = torch.randint(1, 4, (size, 1), generator=numbers)
    return (first + stride * torch.arange(LENGTH + 1)) % WORDS


def main(steps, seed, global_batch, batch, bug):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = DistributedDataParallel(Model())
    norms = [each for each in model.parameters() if each.dtype == torch.float32]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = Probe.from_env(model, optimizer)
    accumulate = global_batch // (batch * ranks)
    for step in range(1, steps + 1):
        mine = samples(seed, step, global_batch)[rank::ranks]
        total = torch.zeros(())
        for tokens in mine.split(batch):
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            probe.batch(inputs, labels)
            logits = model(inputs)
            probe.logits(logits, labels)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / accumulate
            loss.backward()
            total += loss.detach()
        if bug == "half the norms' gradients":
            for each in norms:
                each.grad /= 2
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        still = frozen(model.module, bug)
        optimizer.step()
        for parameter, value in still:
            parameter.data.copy_(value)
        if bug == "norms rounded":
            for each in norms:
                each.data.copy_(each.data.bfloat16())
        probe.step(loss=total, grad_norm=norm)
        optimizer.zero_grad()
    probe.close()
    del model
    dist.destroy_process_group()


def frozen(model, bug):
    """Parameters that a bug keeps from moving in this step, with their values before it."""
    chosen = {
        "a matrix stands still": [model.blocks[1].up.weight],
        "a norm stands still": [model.blocks[1].norm.weight],
    }.get(bug, [])
    return [(each, each.detach().clone()) for each in chosen]


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--bug")
    arguments = parser.parse_args()
    main(**vars(arguments))
