"""What is counted in the first step, for ``in_force.json``: sizes of batches, and how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.rank import world
from harness.rank.names import names_by_type


@dataclass(slots=True)
class FirstStep:
    """One rank's batches of the first step."""

    sizes: list[int] = field(default_factory=list)
    """Samples of every batch."""
    lengths: set[int] = field(default_factory=set)
    """Tokens of a sample, padding counted."""

    def add(self, inputs: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Count a batch; a sample with one label, or of other than integers, has length 1."""
        self.sizes.append(len(inputs))
        if labels is not None:
            tokens = labels.numel()
        else:
            tokens = len(inputs) if inputs.is_floating_point() else inputs.numel()
        self.lengths.add(tokens // max(len(inputs), 1))


def counted(mine: FirstStep, *, first_of_dp: bool) -> dict[str, int | None]:
    """The run's sizes; None for what differs between batches or ranks. Collective."""
    everyone = world.everyones((mine.sizes, sorted(mine.lengths), first_of_dp))
    return {
        "seq_len": _one([length for _, lengths, _ in everyone for length in lengths]),
        "local_batch_size": _one([size for sizes, _, _ in everyone for size in sizes]),
        "global_batch_size": sum(sum(sizes) for sizes, _, first in everyone if first),
        "gradient_accumulation_steps": _one([len(sizes) for sizes, _, _ in everyone]),
    }


def dtypes(parameters: Sequence[tuple[str, Any]], local: Any) -> dict[str, list[str]]:
    """Names of all ranks' parameters by their data type; usually there is one type. Collective."""
    mine = {name: str(local(each).dtype).removeprefix("torch.") for name, each in parameters}
    return names_by_type(world.everyones(mine))


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _one(values: Sequence[int]) -> int | None:
    return values[0] if len(set(values)) == 1 else None
