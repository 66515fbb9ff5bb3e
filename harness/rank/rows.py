"""What has a row of its own in the samples: every trainable parameter, or the matrices in it.

One parameter may hold several matrices (``fused``). Each of them has a row, as it would have if it
were a parameter, so that a long one cannot hide a short one, and so that runs can be compared of
which one keeps them together and one apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from harness.rank import world
from harness.rank.fused import Fused, matrices
from harness.rank.grad_norm import GradNorm
from harness.rank.placement import Held, HeldRun, PlacementError, held
from harness.rank.sketch import HashedPart, hashed_parts


class Shard(NamedTuple):
    """What this rank counts of a row."""

    row: int
    parameter: torch.Tensor
    held: Held | HeldRun
    """Of the parameter."""
    parts: tuple[HashedPart, ...]
    numel: int
    """Entries of the row."""
    chosen: torch.Tensor | None = None
    """Rows of the parameter's shard that belong to the matrix; None: all."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The entries of the row, of a tensor that is placed as the parameter's shard is."""
        return values if self.chosen is None else values[self.chosen]


class Rows(NamedTuple):
    """What has a row, the same on all ranks, and this rank's share."""

    names: tuple[str, ...]
    """Canonical, sorted."""
    sizes: tuple[int, ...]
    """Entries of each whole tensor."""
    shards: tuple[Shard, ...]
    unknown: Mapping[int, str]
    """Rows of which this rank cannot tell what it holds, and why."""


def assign_rows(norm: GradNorm, fused: Mapping[str, Fused], device: torch.device) -> Rows:
    """The rows of a model. Collective over the world.

    Args:
        norm: which shards this rank counts.
        fused: parameters of this rank that hold several matrices, by canonical name.
        device: where the tensors are.
    """
    divided = _everyones(fused, norm.names)
    sizes: dict[str, int] = {}
    for name, size in zip(norm.names, norm.sizes, strict=True):
        if name in divided:
            sizes |= divided[name].sizes(size)
        else:
            sizes[name] = size
    names = tuple(sorted(sizes))
    place = {name: row for row, name in enumerate(names)}
    shards: list[Shard] = []
    unknown: dict[int, str] = {}
    for index, parameter in norm.owned:
        name = norm.names[index]
        whole = divided.get(name)
        try:
            held_here = held(parameter)
        except PlacementError as error:
            unknown |= {place[each]: str(error) for each in (whole.names if whole else (name,))}
            continue
        if whole is None:
            parts = hashed_parts(name, held_here, device)
            shards.append(Shard(place[name], parameter, held_here, parts, held_here.numel))
        else:
            shards += _matrices(whole, parameter, held_here, place, device)
    return Rows(names, tuple(sizes[name] for name in names), tuple(shards), unknown)


def _everyones(fused: Mapping[str, Fused], trained: Sequence[str]) -> dict[str, Fused]:
    """Of all pipeline stages: every rank has a row for each. Collective over the world."""
    known = set(trained)
    return {
        name: each
        for some in world.everyones(dict(fused))
        for name, each in some.items()
        if name in known
    }


def _matrices(
    fused: Fused,
    parameter: torch.Tensor,
    held_here: Held | HeldRun,
    place: Mapping[str, int],
    device: torch.device,
) -> Iterator[Shard]:
    if not isinstance(held_here, Held):
        raise TypeError(f"the shard of {', '.join(fused.names)} is a run of entries")
    for matrix in matrices(fused, held_here):
        name = fused.names[matrix.number]
        yield Shard(
            place[name],
            parameter,
            held_here,
            hashed_parts(name, matrix.held, device),
            matrix.held.numel,
            matrix.rows.to(device),
        )
