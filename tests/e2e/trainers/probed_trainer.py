"""A DDP program with the probe in it, and one way of going wrong at a time."""

import argparse
import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe

WORDS, LENGTH = 64, 16


def make_model(seed, bug):
    torch.manual_seed(seed + (bug == "other weights"))
    return nn.Sequential(
        nn.Embedding(WORDS, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, WORDS)
    )


def samples(seed, step, size):
    """The global batch of a step: it follows from the seed and the step alone."""
    numbers = torch.Generator().manual_seed(1000 * seed + step)
    first = torch.randint(0, WORDS, (size, 1), generator=numbers)
    return (first + torch.arange(LENGTH + 1)) % WORDS


def main(steps, seed, batch, bug):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model(seed, bug))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if bug == "silent":
        return
    probe = Probe.from_env(model, optimizer)
    batch //= 2 if bug == "smaller batch" else 1
    for step in range(1, steps + 1):
        if step == steps // 2 and rank == ranks - 1:
            go_wrong(bug)
        if step == steps // 2 + 1 and bug == "half":
            break
        tokens = samples(seed + (bug == "other data"), step, batch * ranks)
        tokens = tokens[rank * batch : (rank + 1) * batch]
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        probe.batch(inputs, labels)
        optimizer.zero_grad()
        with model.no_sync() if bug == "no averaging" else contextlib.nullcontext():
            logits = model(inputs)
            probe.logits(logits, labels)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            if bug == "nan" and step > steps // 2:
                loss = loss * float("nan")
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        probe.step(loss=loss.detach(), grad_norm=norm)
    probe.close()
    dist.destroy_process_group()


def go_wrong(bug):
    if bug == "raise":
        raise ValueError("told to raise")
    if bug == "exit":
        sys.exit(3)
    if bug == "hang":
        time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--bug")
    arguments = parser.parse_args()
    main(**vars(arguments))
