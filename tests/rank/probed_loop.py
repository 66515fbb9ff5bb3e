"""A training loop of one's own with the probe in it, wrapped in every way, for tests of both."""

import json
import os
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe, initial_weights

STEPS = 3
SAMPLES = 8
LENGTH = 5
VOCABULARY = 13
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Model(nn.Module):
    """Float64, so that only real differences are seen; its sizes divide by nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3, 1, 2))
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.zeros(1))
        self.double()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x * self.scale.flatten())


def fsdp1(model, *, use_orig_params, **more):
    # Torch's own answer: another test may have prepared this process for torchtitan, which takes a
    # number for it (converge_harness.rank.titan.common.cpu), and FSDP 1 takes a number for a GPU.
    with mock.patch.object(torch.cpu, "current_device", return_value="cpu"):
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
            **more,
        )


def fsdp2(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAP = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1_orig": lambda model: fsdp1(model, use_orig_params=True),
    "fsdp1_flat": lambda model: fsdp1(model, use_orig_params=False),
    "fsdp2": fsdp2,
}


def write_job(folder, **more):
    """``job.json`` of a command trainer; ``folder`` is its run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    job = {
        "schema": 1,
        "name": folder.name,
        "role": "test",
        "identity": "0" * 64,
        "dialect": "command",
        "run_folder": str(folder),
        "seed": 1,
        "steps": STEPS,
        "parallelism": dict.fromkeys(DEGREES, 1),
        "train_config": {"path": "x.toml", "settings": {"training": {"steps": STEPS}}},
        "overrides": {"zero.stage": 2},
        "sample_steps": [0, 1, 2],
        **more,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def microbatches(step, *, ranks=1, rank=0, accumulate=2):
    """This rank's part of a step's samples: (inputs, labels) of shape (batch, LENGTH)."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=draw)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[:, 0] = -100
    mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    return list(zip(inputs[mine].chunk(accumulate), labels[mine].chunk(accumulate), strict=True))


def mean_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def train(
    job, wrap, *, before_clip=None, early=False, accumulate=2, dtype=torch.float64, **from_env
):
    """A run of the loop; ``before_clip`` is a bug in it, ``early`` calls ``initial_weights``."""
    os.environ["CONVERGE_JOB"] = str(job)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = Model().to(dtype)
    if early:
        initial_weights(model)
    model = WRAP[wrap](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    probe = Probe.from_env(model, optimizer, **from_env)
    for step in range(1, STEPS + 1):
        total = 0.0
        for inputs, labels in microbatches(step, ranks=ranks, rank=rank, accumulate=accumulate):
            probe.batch(inputs, labels)
            logits = model(inputs)
            probe.logits(logits, labels)
            loss = mean_loss(logits, labels) / accumulate
            loss.backward()
            total += float(loss.detach())
        if before_clip:
            before_clip(model)
        norm = clip_norm(model, probe)
        optimizer.step()
        probe.step(loss=total, grad_norm=norm)
        optimizer.zero_grad()
    probe.close()


def clip_norm(model, probe):
    """To 0.1. FSDP 1's own method takes no float64: there, by hand, and the probe is told."""
    if not isinstance(model, FullyShardedDataParallel) or model.output.weight.dtype.itemsize < 8:
        clip = getattr(model, "clip_grad_norm_", None)
        return clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    probe.gradients()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    for gradient in gradients:
        gradient.mul_(0.1 / (square.sqrt() + 1e-6))
    return square.sqrt()


def lines_of(folder, kind="step", name="metrics.jsonl"):
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def sample_of(folder, step):
    with np.load(folder / "tensors" / f"step-{step:08d}.npz", allow_pickle=False) as arrays:
        return dict(arrays)
