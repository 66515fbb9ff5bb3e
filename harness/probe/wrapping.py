"""How a model is wrapped, and which part of it this rank holds.

This is the common interface to all frameworks. Plain models, DDP and FSDP 2 are handled in
``recognising``, FSDP 1 in ``fsdp1``, and a DeepSpeed engine in ``deepspeed``, whose function
``wrapped_engine(engine) -> Wrapped`` is called if the model is an instance of a class
``DeepSpeedEngine``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from converge_harness.rank.recorder.flat_shard import FlatShard

Held: TypeAlias = "torch.Tensor | FlatShard"
"""A plain tensor (a whole copy), a DTensor, or a run of a whole tensor's entries."""
Undo: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A model as the probe needs it, on this rank."""

    wrapping: str
    """As in ``in_force.json``: ``none DDP FSDP1 FSDP2 ZeRO-0 … ZeRO-3``, joined by ``+``."""
    modules: tuple[torch.nn.Module, ...]
    """The user's modules, without wrappers that change names; buffers are read from them."""
    parameters: tuple[tuple[str, Held], ...]
    """Canonical name and shard of every trainable parameter that this rank holds a part of; a
    parameter may appear in several disjoint shards. Gradients, sketches and optimizer states are
    read from these. If several ranks hold the same run, each lists it, and it is counted once."""
    copies: tuple[tuple[str, Held], ...]
    """Tensors that may have copies on other ranks, including frozen parameters; copies are compared
    bit by bit. Usually all of ``parameters``. With ZeRO 1 and 2, whose ranks all hold the
    parameters but only a part of gradients and states: for each parameter a ``FlatShard`` of the
    whole tensor without gradient and states."""
    optimizers: tuple[Any, ...]
    """They have ``param_groups``: the learning rate is read from the first. Hooks of torch's
    optimizers mark when a step begins and ends."""
    kept_by: tuple[Any, ...]
    """They have ``state``, a mapping from the objects in ``parameters`` and ``copies`` to their
    optimizer states: torch's optimizers, or a ``FetchedStates`` of the shards."""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Degrees above 1 that the wrapping shows: ``dp_replicate dp_shard tp cp pp ep``."""
    movable: bool = False
    """Whether the initial weights can still be moved in place, all ranks alike."""
    watch_clipping: Callable[[Callable[[], None]], Undo] | None = None
    """For a framework that clips by itself: registers a function to call when the gradients of a
    step are complete and not yet clipped; returns a function that removes it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The framework's version, for the header of ``metrics.jsonl``."""
    problems: tuple[str, ...] = ()
    """Sentences on why the model cannot be probed; ``Probe.from_env`` raises them."""
