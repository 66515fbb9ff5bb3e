"""The rows of the samples: every trainable parameter, or the matrices in a fused one.

One parameter may contain several matrices: torchtitan's ``wqkv`` has queries, keys and values. At
initial weights the gradient of the values is a hundred times as long as those of queries and keys,
and hides them. So each has its own row, as if it were a parameter. This also makes runs with fused
and separate matrices comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.grad_norm import GradNorm
from converge_harness.rank.recorder.placement import Held, HeldRun, PlacementError, held
from converge_harness.rank.recorder.sketch import HashedPart, hashed_parts


class Shard(NamedTuple):
    """The part of a row that this rank counts."""

    row: int
    parameter: torch.Tensor
    held: Held | HeldRun
    """The held entries of the parameter."""
    parts: tuple[HashedPart, ...]
    numel: int
    """Entries of the row."""
    chosen: torch.Tensor | None = None
    """Rows of the parameter's shard that belong to the matrix; None: all."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The row's entries of a tensor that is placed like the parameter's shard."""
        return values if self.chosen is None else values[self.chosen.to(values.device)]


class Rows(NamedTuple):
    """The rows (the same on all ranks), and this rank's part of them."""

    names: tuple[str, ...]
    """Canonical names, sorted."""
    sizes: tuple[int, ...]
    """Entries of each whole tensor."""
    shards: tuple[Shard, ...]
    unknown: Mapping[int, str]
    """Rows whose held entries this rank cannot determine, and why."""


def assign_rows(norm: GradNorm, fused: Mapping[str, Fused], device: torch.device) -> Rows:
    """The rows of a model. Collective over the world.

    Args:
        norm: which shards this rank counts.
        fused: parameters of this rank that contain several matrices, by canonical name.
        device: of the tensors.
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
    """The rows of all pipeline stages, on every rank. Collective over the world."""
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


@dataclass(frozen=True, slots=True)
class Fused:
    """Which rows of a fused parameter belong to which matrix: a repeating pattern of blocks."""

    names: tuple[str, ...]
    """Canonical names of the matrices."""
    block: int
    """Consecutive rows of one matrix."""
    pattern: tuple[int, ...]
    """Index into ``names`` of each block in a period."""
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By index into ``names``, for matrices whose rows have another order under that name: the
    place of each row of a block in the block."""

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Index into ``names`` of each row of the whole parameter."""
        pattern = torch.tensor(self.pattern, device=rows.device)
        return pattern[rows // self.block % len(self.pattern)]

    def sizes(self, whole: int) -> dict[str, int]:
        """Entries of each matrix in a parameter with ``whole`` entries."""
        return {
            name: whole * self.pattern.count(number) // len(self.pattern)
            for number, name in enumerate(self.names)
        }


@dataclass(frozen=True, slots=True)
class Matrix:
    """A shard's part of one of the matrices."""

    number: int
    """Index into ``Fused.names``."""
    rows: torch.Tensor
    """Shape (rows,), int64: the matrix's rows in the shard, in the order of the matrix."""
    held: Held
    """Those rows, as entries of the matrix as a separate tensor."""


def matrices(fused: Fused, held: Held) -> Sequence[Matrix]:
    """The parts of a shard that belong to each matrix, for any sharding."""
    of_whole = fused.of_rows(torch.arange(held.whole[0]))
    leading, _ = held.divided(1)
    here = leading.flat_index(0, leading.numel, "cpu")
    found = []
    for number in range(len(fused.names)):
        belongs = of_whole == number
        rows = torch.nonzero(belongs[here]).flatten()
        # Row r of the whole is row n of the matrix, where n of its rows come before.
        places = (belongs.cumsum(0) - 1)[here[rows]]
        if number in fused.orders:
            order = torch.tensor(fused.orders[number])
            places = places - places % fused.block + order[places % fused.block]
            ascending = places.argsort()
            rows, places = rows[ascending], places[ascending]
        whole = (int(belongs.sum()), *held.whole[1:])
        found.append(Matrix(number, rows, Held(whole, (_runs(places), *held.runs[1:]))))
    return found


def _runs(places: torch.Tensor) -> tuple[range, ...]:
    """Ascending indices as runs of consecutive ones."""
    if not len(places):
        return ()
    ends = torch.nonzero(places.diff() != 1).flatten() + 1
    starts = [0, *ends.tolist()]
    stops = [*ends.tolist(), len(places)]
    values = places.tolist()
    return tuple(
        range(values[start], values[stop - 1] + 1)
        for start, stop in zip(starts, stops, strict=True)
    )
