"""How a model is wrapped, and what of it this rank therefore holds.

The interface that every framework is brought to. A plain model, DDP and FSDP 2 are told here; FSDP
1 in ``converge_harness.probe.fsdp1``; a DeepSpeed engine in ``converge_harness.probe.deepspeed``,
whose one function ``wrapped_engine(engine) -> Wrapped`` is called when the model is an instance of
a class ``DeepSpeedEngine``.
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
    """As ``in_force.json`` says it: ``none DDP FSDP1 FSDP2 ZeRO-0 … ZeRO-3``, joined by ``+``."""
    modules: tuple[torch.nn.Module, ...]
    """The user's modules, wrappers that add to names taken off: buffers are read from them."""
    parameters: tuple[tuple[str, Held], ...]
    """Canonical name and shard of every trainable parameter that this rank holds a part of; a
    parameter may appear in several disjoint shards. Gradients, sketches and the states of the
    optimizer are taken from these. Where all ranks together hold a run several times, each rank
    says the same run, and it is counted once."""
    copies: tuple[tuple[str, Held], ...]
    """What may have copies on other ranks, frozen parameters too, and is compared with them bit by
    bit: usually all that ``parameters`` has. Under ZeRO 1 and 2, whose ranks all hold the
    parameters but only a part of gradients and states: for each parameter a ``FlatShard`` of the
    whole without gradient and states."""
    optimizers: tuple[Any, ...]
    """With ``param_groups``: the learning rate is read from the first. Those that are torch's tell
    when a step begins and ends."""
    kept_by: tuple[Any, ...]
    """With ``state``, a mapping from the very objects of ``parameters`` and ``copies`` to what the
    optimizer keeps for them: torch's optimizers, or a ``FlatOptimizer`` of the shards."""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Degrees above 1 that the wrapping shows: ``dp_replicate dp_shard tp cp pp ep``."""
    movable: bool = False
    """Whether the initial weights can still be moved in place, all ranks alike."""
    watch_clipping: Callable[[Callable[[], None]], Undo] | None = None
    """Where the framework clips by itself: calls what it is given once the gradients of a step are
    complete and not yet clipped; returns what takes the watch off again."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the framework, for the header of ``metrics.jsonl``."""
    problems: tuple[str, ...] = ()
    """Why the model cannot be probed, in sentences; then ``Probe.from_env`` raises them."""
