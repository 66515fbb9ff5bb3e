"""A small language model under DDP, as train.py, and probed (docs/tutorial.md)."""

import argparse
import csv
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP would import it later, and its defaults keep the process group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe

VOCAB, WIDTH, LENGTH = 97, 64, 32


def samples(seed: int, step: int, count: int) -> torch.Tensor:
    """The global batch of a step, (count, LENGTH + 1): sequences that go on by a fixed stride."""
    dice = torch.Generator().manual_seed(1000 * seed + step)
    start = torch.randint(VOCAB, (count, 1), generator=dice)
    stride = torch.randint(1, 5, (count, 1), generator=dice)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCAB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--out", default=".")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, VOCAB)]
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    probe = Probe.from_env(model, optimizer)
    accumulate = args.global_batch // (args.micro_batch * ranks)

    losses = []
    for step in range(1, args.steps + 1):
        mine = samples(args.seed, step, args.global_batch)[rank::ranks]
        total = torch.zeros(())
        for microbatch in mine.split(args.micro_batch):
            inputs, labels = microbatch[:, :-1], microbatch[:, 1:]
            probe.batch(inputs, labels)
            logits = model(inputs).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels.flatten()) / accumulate
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(total)
        probe.step(loss=total.item() / ranks, grad_norm=norm.item())
        optimizer.zero_grad()
        losses.append((step, total.item() / ranks, norm.item()))

    if rank == 0:
        with Path(args.out, "loss.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("step", "loss", "grad_norm"), *losses])
    del model  # it holds the process group, too: now gloo's threads end before the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
