"""Where things are in a built trainer, for the recorder."""

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
    """Whether this rank reports for its dp coordinate: it is the first on cp, tp and pp."""
    has_last_stage: bool
    """Whether this rank computes the loss; True without pipeline parallelism."""
    tp_rank: int
    tp_group: dist.ProcessGroup | None
    """None if tensor parallelism is off."""
    vocab_size: int
    """Size of the whole model's vocabulary, by which shards in plain tensors are recognised."""
    device: torch.device
    optimizers: tuple[torch.optim.Optimizer, ...]
    """The optimizers of this rank's parameters."""
    learning_rate: Callable[[], float]
    """The learning rate of the next optimizer step."""
    reads_batches: bool = True
    """Whether this rank's batches can be seen: in Megatron-LM one of several ranks reads them, and
    only parts of them get to the others."""
    logits_optional: bool = False
    """Whether a loop may pass no logits at all: then no loss is recomputed."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of torch and torchtitan, for the header of metrics.jsonl."""
    parameters: Sequence[tuple[str, Any]] | None = None
    """Trainable parameters, or fetched shards, of this rank by canonical name; None: those of
    the model parts. They are the keys of the states in ``optimizers``."""
    copies: Sequence[tuple[str, Any]] | None = None
    """Tensors that may have copies on other ranks; None: all parameters of the model parts."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Fused parameters on this rank, by canonical name."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """Modules whose results have several matrices' columns one after the other, each divided among
    the tensor-parallel ranks, and how many."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """By canonical name, what another trainer calls the module that computes the same."""
    shows_modules: bool = True
    """Whether modules may have hooks in the first batches; False: the whole model is compiled."""
    stateful: Callable[[], Iterable[object]] = tuple
    """Objects beside the model that may hold random generators, such as parts of the checkpoint;
    asked when training is about to begin."""
    frames_steps: bool = True
    """Whether a step begins before anything of it is computed; else random numbers that are drawn
    from the end of one step to the end of the next count as the next one's."""
    loss_is_local: bool = False
    """Whether each rank reports the mean loss of its own tokens, which have to be averaged."""


def rate_of(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """The learning rate of the first parameter group.

    Not the schedule's value: the two differ if the schedule is not loaded at a resume.
    """
    return float(next(iter(optimizers)).param_groups[0]["lr"])
