"""Recomputes the global gradient norm in float64, counting each distinct shard once.

Which ranks hold the same shard is determined once, before the first step, from the placements: a
shard's key is its parameter's canonical name and its coordinates on the mesh dimensions that shard
it. Replicated dimensions are not in the key, so of all ranks that hold a copy exactly one counts
it, for any combination of FSDP, HSDP, DDP, TP, CP and PP. Shards with copies are distributed over
their holders, so that no rank waits for another that counts them all.

A gradient may be a DTensor of partial sums when it is clipped (a replicated norm weight with TP
only, in torchtitan 0.2.2): clipping and the optimizer, which are DTensor operations, reduce it when
they read it. Each rank's own part is neither the gradient nor a copy of it, so ``whole_gradients``
reduces it while it is read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.cross_entropy import local_part
from converge_harness.rank.recorder.fetched_shard import FetchedShard
from converge_harness.rank.recorder.names import canonical
from converge_harness.run_folder.metrics import Unmeasured

_BLOCK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Entries converted to float64 at a time."""

ShardKey = tuple[str, tuple[tuple[str, int], ...]]
"""Canonical name; (mesh dimension, coordinate) for every dimension that shards it, or the place of
a fetched shard."""


@dataclass(slots=True)
class GradNorm:
    """Which gradients this rank counts, and the latest squared norms."""

    names: tuple[str, ...]
    """Canonical names of every trainable parameter of the whole model, sorted."""
    sizes: tuple[int, ...]
    """Entries of each whole parameter."""
    owned: list[tuple[int, torch.Tensor]]
    """Index into ``names`` and the parameter, for shards that this rank counts."""
    problems: list[Unmeasured] = field(default_factory=list)
    """Gradients that cannot be counted; the norm is then no evidence."""

    @torch.no_grad()
    def take(self) -> SquareSums:
        """Per entry of ``names``, the sum of squares of this rank's own shards of its gradient."""
        self.problems.clear()
        shards: list[tuple[int, torch.Tensor]] = []
        for index, parameter in self.owned:
            gradient = parameter.grad
            if gradient is None:
                continue
            problem = placement_problem(parameter, gradient)
            if problem:
                self.problems.append(Unmeasured(problem, self.names[index]))
                continue
            shards.append((index, local_part(gradient)))
        return SquareSums(shards, len(self.names))


class SquareSums:
    """Per row, the sum of squares of its shards in float64; a row without shards has 0.

    What is computed stays on the devices of the shards, which need not be one, until it is asked
    for: code that reads gradients before they are clipped must not wait for the device there.
    """

    def __init__(self, shards: Iterable[tuple[int, torch.Tensor]], rows: int) -> None:
        self._rows = rows
        found: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for index, shard in shards:
            indices, blocks = found.setdefault(shard.device, ([], []))
            limit = _BLOCK_ELEMENTS.get(shard.device.type, _BLOCK_ELEMENTS["cuda"])
            # In blocks, because a norm in float64 may copy to float64.
            parts = (shard,) if shard.numel() <= limit else shard.reshape(-1).split(limit)
            indices.extend([index] * len(parts))
            blocks.extend(parts)
        self._norms = [
            (indices, torch.stack(torch._foreach_norm(blocks, 2, dtype=torch.float64)))
            for indices, blocks in found.values()
        ]
        """Of each device, the row and the norm of every block; one call for all."""

    def numbers(self) -> list[float]:
        """The sums; one transfer from each device, which waits for it."""
        sums = [0.0] * self._rows
        for indices, norms in self._norms:
            for index, norm in zip(indices, norms.tolist(), strict=True):
                sums[index] += norm**2
        return sums


def trainable(model_parts: Iterable[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """This rank's trainable parameters by canonical name; a tied weight appears once."""
    return [
        (canonical(name), parameter)
        for part in model_parts
        for name, parameter in part.named_parameters()
        if parameter.requires_grad
    ]


def assign_shards(parameters: Sequence[tuple[str, torch.Tensor]]) -> GradNorm:
    """Decide which rank counts which shard, of parameters or buffers. Collective over the world."""
    mine = [
        (shard_key(name, parameter), parameter.numel(), local_part(parameter).numel())
        for name, parameter in parameters
    ]
    everyone = world.everyones(mine)
    sizes = {key[0]: size for shards in everyone for key, size, _ in shards}
    owner = _owners([[(key, entries) for key, _, entries in shards] for shards in everyone])
    names = tuple(sorted(sizes))
    index = {name: position for position, name in enumerate(names)}
    owned = [
        (index[name], parameter)
        for (key, *_), (name, parameter) in zip(mine, parameters, strict=True)
        if owner[key] == world.rank()
    ]
    return GradNorm(names, tuple(sizes[name] for name in names), owned)


def shard_key(name: str, tensor: torch.Tensor) -> ShardKey:
    """A key that is equal exactly on the ranks that hold the same shard of the same tensor."""
    if isinstance(tensor, FetchedShard):
        return name, tensor.place
    if not isinstance(tensor, DTensor):
        return name, ()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    dims = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    sharded = tuple(
        (dims[dim], coordinate[dim])
        for dim, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate) and mesh.size(dim) > 1
    )
    return name, sharded


def _owners(everyone: Sequence[Sequence[tuple[ShardKey, int]]]) -> dict[ShardKey, int]:
    """Which rank counts each shard; every rank computes the same result.

    ``everyone`` has each rank's shards and their entries. A shard on one rank only is counted
    there; the others are assigned, largest first, to the holder with the fewest entries so far.
    """
    entries: dict[ShardKey, int] = {}
    holders: dict[ShardKey, list[int]] = defaultdict(list)
    for rank, shards in enumerate(everyone):
        for key, count in shards:
            entries.setdefault(key, count)
            holders[key].append(rank)
    load = [0] * len(everyone)
    owner: dict[ShardKey, int] = {}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -entries[key], key)):
        rank = min(holders[key], key=lambda holder: (load[holder], holder))
        owner[key] = rank
        load[rank] += entries[key]
    return owner


def global_norm(rows: Sequence[Sequence[float]] | npt.NDArray[np.float64]) -> float:
    """Square root of the sum over ranks and parameters, rounded once."""
    squares = np.asarray(rows, dtype=np.float64).ravel()
    # Each shard is counted by one rank, and is 0 on all others.
    return math.sqrt(math.fsum(squares[squares != 0].tolist()))


def placement_problem(parameter: torch.Tensor, gradient: torch.Tensor) -> str:
    """Why a gradient's norm cannot be summed over its shards; empty if it can."""
    placements = _placements(gradient)
    if any(placement.is_partial() for placement in placements):
        return f"gradient is an unreduced partial sum, placements {placements}"
    if placements != _placements(parameter):
        return f"gradient is placed {placements}, its parameter {_placements(parameter)}"
    if _place(gradient) != _place(parameter):
        return f"gradient is entries {_place(gradient)}, its parameter {_place(parameter)}"
    return ""


def _placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


def _place(tensor: torch.Tensor | FetchedShard) -> tuple[tuple[str, int], ...] | None:
    return tensor.place if isinstance(tensor, FetchedShard) else None


@contextmanager
def whole_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """During the block, ``grad`` of each parameter is placed like the parameter.

    Collective over each mesh on which a gradient is a partial sum; if there is none, a no-op.
    """
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                continue
            gradient = parameter.grad
            if not isinstance(gradient, DTensor):
                continue
            if any(placement.is_partial() for placement in gradient.placements):
                kept.append((parameter, gradient))
                parameter.grad = gradient.redistribute(placements=parameter.placements)
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
