"""Where things are in a built trainer: what the recorder is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from converge_harness.rank.recorder.rows import Fused


@dataclass(frozen=True, slots=True)
class TrainerView:
    """Where things are in a built trainer, as one rank sees it."""

    model_parts: tuple[torch.nn.Module, ...]
    """The pipeline stages on this rank, or the one model."""
    dp_rank: int
    """Which part of the global batch this rank trains on."""
    first_of_dp: bool
    """Whether this rank speaks for its dp coordinate: first on cp, tp and pp."""
    has_last_stage: bool
    """Whether this rank computes the loss; True without pipeline parallelism."""
    tp_rank: int
    tp_group: dist.ProcessGroup | None
    """None when tensor parallelism is off."""
    vocab_size: int
    """Of the whole model: tells vocabulary shards in plain tensors."""
    device: torch.device
    optimizers: tuple[torch.optim.Optimizer, ...]
    """Those of the parameters on this rank."""
    learning_rate: Callable[[], float]
    """The rate that the next optimizer step will use."""
    logits_optional: bool = False
    """Whether a loop may give no logits at all: then no loss is recomputed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and torchtitan, for the header of metrics.jsonl."""
    parameters: Sequence[tuple[str, Any]] | None = None
    """Trainable parameters, or flat shards, of this rank by canonical name; None: those of the
    model parts. ``optimizers`` keep their states by the same objects."""
    copies: Sequence[tuple[str, Any]] | None = None
    """What may have copies on other ranks; None: all parameters of the model parts."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Parameters on this rank that hold several matrices, by canonical name."""
    loss_is_local: bool = False
    """Whether each rank reports the mean loss of its own tokens, and theirs is to be told."""


def rate_of(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """The learning rate of the first group of parameters.

    Not what the schedule says: a schedule that is not loaded at a resume leaves the optimizer's.
    """
    return float(next(iter(optimizers)).param_groups[0]["lr"])
