"""The evidence of each step, the same for every dialect; a dialect only says where things are.

In a training step a dialect calls, in this order::

    begin_step(step)               before anything of the step
    on_batch(inputs, labels)       once per batch taken from the loader, before any CP split
    on_logits(logits, labels)      wherever the loss function is called, outside compiled code
    before_clip()                  gradients are complete and not yet clipped
    on_log(loss, grad_norm)        what the trainer reports
    end_step()                     on **every** rank: the one collective of the step

and ``close(steps)`` after the last step. Each rank keeps what it saw; ``end_step`` gathers one
small float64 row from every rank, and the writer (the lowest rank that holds the last pipeline
stage) turns the rows into one line of ``metrics.jsonl``. All sums over ranks are made by
``math.fsum`` in rank order, so they are exact to one rounding and the same in every run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.rank.cross_entropy import CrossEntropySum
from harness.rank.digest import BatchDigest, combine
from harness.rank.grad_norm import GradNorm
from harness.rank.job import Job
from harness.rank.memory import peak_memory_bytes
from harness.rank.writer import MetricsWriter

IGNORE_INDEX = -100
"""The label that both torchtitan and this project's loader give to positions without a target."""


@dataclass(frozen=True, slots=True)
class TrainerView:
    """Where things are in a built trainer, as one rank sees it."""

    model_parts: tuple[torch.nn.Module, ...]
    """The pipeline stages on this rank, or the one model."""
    dp_rank: int
    """Which part of the global batch this rank trains on."""
    dp_degree: int
    first_of_dp: bool
    """Whether this rank speaks for its dp coordinate: first on cp, tp and pp."""
    has_last_stage: bool
    tp_rank: int
    tp_group: dist.ProcessGroup | None
    """None when tensor parallelism is off."""
    vocab_size: int
    """Of the whole model: tells vocabulary shards in plain tensors."""
    device: torch.device
    learning_rate: Callable[[], float]
    """The rate that the next optimizer step will use."""
    versions: Mapping[str, str] = field(default_factory=dict)
