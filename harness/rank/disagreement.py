"""Copies of a tensor that differ: which ranks hold equal bits, and along which mesh dimensions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from harness.rank.trainer_view import TrainerView


@dataclass(frozen=True, slots=True)
class HeldShard:
    """What one rank holds of a shard that disagrees."""

    own: Mapping[str, int]
    """The rank's coordinates on the tensor's own mesh."""
    digests: frozenset[tuple[str, int]]
    """(name of the optimizer state or empty, digest); empty when nothing is there."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What one rank says about the shards that disagree."""

    coordinates: Mapping[str, int]
    """Of the rank, on every mesh dimension that is known."""
    shards: Mapping[int, HeldShard] = field(default_factory=dict)
    """By slot, the same on all ranks; only those that the rank holds."""


def disagreement(
    kind: str, name: str, slots: Sequence[int], everyone: Sequence[Holder]
) -> dict[str, Any]:
    """A tensor's entry in the ``replicas`` line, from all ranks in order.

    ``slots`` are the shards of the tensor that disagree. Ranks of a group hold the same bits of
    the same shard.
    """
    groups: list[list[int]] = []
    group_of: dict[tuple[int, int], int] = {}
    states: set[str] = set()
    for slot in slots:
        ranks_with: dict[frozenset[tuple[str, int]], list[int]] = defaultdict(list)
        for rank, holder in enumerate(everyone):
            if slot in holder.shards:
                ranks_with[holder.shards[slot].digests].append(rank)
        agreed = frozenset.intersection(*ranks_with)
        for digests, ranks in ranks_with.items():
            group_of |= {(slot, rank): len(groups) for rank in ranks}
            groups.append(ranks)
            states |= {state for state, _ in digests - agreed if state}
    places = {(slot, rank): _place(everyone[rank], slot) for slot, rank in group_of}
    entry: dict[str, Any] = {
        "kind": kind,
        "tensor": name,
        "mesh_dims": list(_dims_that_tell(group_of, places)),
        "groups": sorted(groups),
    }
    if states:
        entry["states"] = sorted(states)
    return entry


def rank_coordinates(view: TrainerView, tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """This rank's place on every mesh dimension that its tensors and its trainer show."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found |= mesh_coordinates(tensor)
    if view.tp_group is not None:
        found.setdefault("tp", view.tp_rank)
    # What DDP keeps in step lies on no mesh; then the ranks of data parallelism are its replicas.
    found.setdefault("dp_replicate", view.dp_rank)
    return found


def mesh_coordinates(tensor: torch.Tensor) -> dict[str, int]:
    """A rank's coordinates on the dimensions, of more than one rank, of a DTensor's mesh."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(str(dim) for dim in range(mesh.ndim))
    places = zip(names, mesh.get_coordinate() or (), strict=False)
    return {name: place for dim, (name, place) in enumerate(places) if mesh.size(dim) > 1}


def _place(holder: Holder, slot: int) -> dict[str, int]:
    """Coordinates of a copy, those on the tensor's own mesh first."""
    own = holder.shards[slot].own
    return {**own, **{dim: at for dim, at in holder.coordinates.items() if dim not in own}}


def _dims_that_tell(
    group_of: Mapping[tuple[int, int], int], places: Mapping[tuple[int, int], Mapping[str, int]]
) -> tuple[str, ...]:
    """The fewest mesh dimensions whose coordinates tell which group a (slot, rank) is in.

    Empty when the known ones do not tell, as when pipeline stages hold different copies of a
    buffer.
    """
    dims = tuple(dict.fromkeys(dim for place in places.values() for dim in place))
    for size in range(1, len(dims) + 1):
        for chosen in combinations(dims, size):
            told: dict[tuple[int, ...], int] = {}
            if all(
                told.setdefault((copy[0], *(places[copy].get(dim, -1) for dim in chosen)), group)
                == group
                for copy, group in group_of.items()
            ):
                return chosen
    return ()
