"""A plain training loop, twice in one process: without and with the probe library.

``torchrun benchmarks/probed_script.py JOB.json PLAN.json``, started by ``probe_cost.py``. The two
alternate as the plan's modes say, so that slow phases of the machine affect both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from converge_harness.probe import Probe

CLOCKS = {"wall": time.perf_counter, "processors": time.process_time}
VOCABULARY, WIDTH, LAYERS, SAMPLES, LENGTH = 2048, 256, 4, 8, 128


class Model(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(self.embedding(tokens)))


def loop(job: str) -> Callable[[], None]:
    """A function that trains one step, probed as the job says; an empty path means no probe."""
    os.environ["CONVERGE_JOB"] = job
    model: nn.Module = Model()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    probe = Probe.from_env(model, optimizer)
    draw = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=draw)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        probe.batch(inputs, labels)
        logits = model(inputs)
        probe.logits(logits, labels)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        probe.step(loss=loss, grad_norm=norm)
        optimizer.zero_grad()

    return step


def now() -> dict[str, float]:
    return {clock: read() for clock, read in CLOCKS.items()}


def since(began: dict[str, float]) -> dict[str, float]:
    return {clock: seconds - began[clock] for clock, seconds in now().items()}


def main(job: str, plan_path: str) -> None:
    """Write seconds per step, and for making the probed loop, to the plan's ``result``."""
    plan = json.loads(Path(plan_path).read_text())
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    bare = loop("")
    began = now()
    probed = loop(job)
    result: dict[str, Any] = {"made": since(began), **{clock: [] for clock in CLOCKS}}
    for mode in plan["modes"]:
        if dist.is_initialized():
            dist.barrier()
        began = now()
        (bare if mode == "off" else probed)()
        for clock, seconds in since(began).items():
            result[clock].append(seconds)
    if int(os.environ["RANK"]) == 0:
        Path(plan["result"]).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
