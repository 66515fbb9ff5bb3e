"""Which entries of the whole tensor a rank's shard has, for every placement.

A shard is the product over the dimensions of some runs of coordinates.
``torch.distributed.tensor._utils.compute_local_shape_and_global_offset`` only returns the start of
the first run; a strided shard (FSDP over TP on one dimension) has several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from converge_harness.rank.recorder.block_shard import BlockShard
from converge_harness.rank.recorder.fetched_shard import FetchedShard
from converge_harness.rank.recorder.flat_shard import FlatShard

Runs = tuple[range, ...]
"""Coordinates along one dimension, in the shard's order."""


class PlacementError(Exception):
    """The placements do not show which entries a shard holds."""


@dataclass(frozen=True, slots=True)
class Held:
    """The entries of a whole tensor that one rank's shard holds."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    runs: tuple[Runs, ...]
    """Per dimension, the coordinates held."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(_length(runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fits(self, local: tuple[int, ...]) -> bool:
        """Whether a local tensor of this shape can be the shard; empty ones have any shape."""
        return self.shape == local or self.numel == math.prod(local) == 0

    def flat_index(self, start: int, stop: int, device: torch.device | str) -> torch.Tensor:
        """Flat indices in the whole tensor of the entries ``start:stop`` of the flattened shard.

        Shape (stop - start,), int64.
        """
        rest = torch.arange(start, stop, device=device)
        index = torch.zeros_like(rest)
        stride = 1
        for size, runs in zip(reversed(self.whole), reversed(self.runs), strict=True):
            length = _length(runs)
            index += _coordinates(runs, rest % length) * stride
            rest = rest // length
            stride *= size
        return index

    def blocks(
        self, entries: int, device: torch.device | str
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of the flattened shard with their indices in the whole, ``entries`` at a time."""
        for start in range(0, self.numel, entries):
            stop = min(start + entries, self.numel)
            yield slice(start, stop), self.flat_index(start, stop, device)

    def divided(self, dim: int) -> tuple[Held, Held]:
        """The dimensions before ``dim``, and those from it on: the shard is their product."""
        leading = Held(self.whole[:dim], self.runs[:dim])
        return leading, Held(self.whole[dim:], self.runs[dim:])


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a rank's part of a parameter belongs."""

    name: str
    parameter: torch.nn.Parameter
    held: Held


@dataclass(frozen=True, slots=True)
class HeldRun:
    """The same for a shard that is a run of the flattened whole, as in FSDP 1 and ZeRO."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.numel,)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def fits(self, local: tuple[int, ...]) -> bool:
        """Whether a local tensor of this shape can be the shard."""
        return self.numel == math.prod(local)

    def blocks(
        self, entries: int, device: torch.device | str
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of the run with their flat indices in the whole, ``entries`` at a time."""
        for begin in range(self.start, self.stop, entries):
            end = min(begin + entries, self.stop)
            part = slice(begin - self.start, end - self.start)
            yield part, torch.arange(begin, end, device=device)

    def matrices(self, rows: int, columns: int) -> Iterator[tuple[slice, Held]]:
        """The run as blocks of the whole viewed as a matrix of that shape.

        Up to three blocks: the end of one row, whole rows, the start of another. Each has its slice
        of the run, and the entries that it holds.
        """
        first_whole = -(-self.start // columns) * columns
        last_whole = self.stop // columns * columns
        cuts = sorted({self.start, min(first_whole, self.stop), max(last_whole, self.start)})
        for begin, end in itertools.pairwise([*cuts, self.stop]):
            if begin < end:
                top, left = divmod(begin, columns)
                bottom, right = divmod(end - 1, columns)
                runs = ((range(top, bottom + 1),), (range(left, right + 1),))
                part = slice(begin - self.start, end - self.start)
                yield part, Held((rows, columns), runs)


def held(tensor: torch.Tensor | FetchedShard) -> Held | HeldRun:
    """The entries that this rank holds: all of a plain tensor, or those of a shard.

    Raises PlacementError for partial sums and when placements and shard disagree.
    """
    whole = tuple(tensor.shape)
    if isinstance(tensor, FlatShard):
        return HeldRun(whole, tensor.start, tensor.stop)
    if isinstance(tensor, BlockShard):
        return Held(whole, tensor.runs)
    if not isinstance(tensor, DTensor):
        return Held(whole, tuple((range(size),) for size in whole))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise PlacementError("this rank is not on the tensor's mesh")
    placements = tuple(tensor.placements)
    sizes = tuple(tensor.device_mesh.shape)
    found = {
        Held(whole, _divide(whole, sizes, coordinate, steps))
        for steps in _orders(placements, sizes)
    }
    local = tuple(tensor._local_tensor.shape)
    fitting = [candidate for candidate in found if candidate.fits(local)]
    if not fitting or (len(fitting) > 1 and fitting[0].numel > 0):
        raise PlacementError(
            f"placements {placements} on a mesh of shape {sizes} do not say which entries of "
            f"shape {whole} a shard of shape {local} holds"
        )
    return fitting[0]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor, once its collective has ended."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's entries as a plain tensor that shares their memory, without autograd.

    Wrappers around a single tensor, such as Float8's weights for FSDP's all-gather, are removed.
    """
    if isinstance(tensor, FetchedShard):
        return tensor.local()
    local = local_tensor(tensor)
    if is_traceable_wrapper_subclass(local):
        inner = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
        same = [part for part in inner if part.shape == local.shape]
        local = same[0] if len(same) == 1 else local
    return local.detach()


_Step = tuple[int, Placement]
"""A mesh dimension and the placement on it."""


def _orders(placements: Sequence[Placement], sizes: Sequence[int]) -> list[list[_Step]]:
    """The orders in which mesh dimensions may have divided a tensor.

    DTensor applies placements from left to right. FSDP2 shards what TP has already sharded, and
    expresses that with ``_StridedShard``, which is equivalent only if the divisions have no
    remainder: so such placements may also be applied as FSDP2 does, from right to left.
    """
    steps = list(enumerate(placements))
    strided = [step for step in steps if isinstance(step[1], _StridedShard)]
    if not all(_is_fsdp_over(step, steps, sizes) for step in strided):
        return [steps]
    plain = [step for step in steps if not isinstance(step[1], _StridedShard)]
    as_plain = [(dim, Shard(placement.dim)) for dim, placement in reversed(strided)]
    return [steps, plain + as_plain] if strided else [steps]


def _is_fsdp_over(strided: _Step, steps: Sequence[_Step], sizes: Sequence[int]) -> bool:
    """Whether the split factor is the number of shards of the mesh dimensions to the right."""
    shards = math.prod(
        sizes[dim]
        for dim, placement in steps[strided[0] + 1 :]
        if _divides(placement) and placement.dim == strided[1].dim
    )
    return bool(strided[1].split_factor == shards)


def _divides(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


def _divide(
    whole: tuple[int, ...], sizes: Sequence[int], coordinate: Sequence[int], steps: Sequence[_Step]
) -> tuple[Runs, ...]:
    """Per dimension, the coordinates of a mesh coordinate's shard after all steps."""
    runs: list[Runs] = [(range(size),) for size in whole]
    for mesh_dim, placement in steps:
        if isinstance(placement, Replicate):
            continue
        if not _divides(placement):
            raise PlacementError(f"placement {placement} is neither a shard nor a replica")
        before = runs[placement.dim]
        pieces = placement.split_factor if isinstance(placement, _StridedShard) else 1
        runs[placement.dim] = tuple(
            run
            for piece in range(pieces)
            for run in _chunk(_chunk(before, pieces, piece), sizes[mesh_dim], coordinate[mesh_dim])
        )
    return tuple(_joined(some) for some in runs)


def _chunk(runs: Runs, chunks: int, which: int) -> Runs:
    """One of the chunks that ``torch.chunk`` makes, or nothing if it makes fewer."""
    size = -(-_length(runs) // chunks)
    first, last = size * which, size * (which + 1)
    parts = []
    for run in runs:
        part = run[max(0, first) : max(0, last)]
        if len(part):
            parts.append(part)
        first -= len(run)
        last -= len(run)
    return tuple(parts)


def _joined(runs: Runs) -> Runs:
    """The same coordinates in as few runs as possible."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)


def _length(runs: Runs) -> int:
    return sum(len(run) for run in runs)


def _coordinates(runs: Runs, positions: torch.Tensor) -> torch.Tensor:
    """Coordinates in the whole tensor of positions in the shard, along one dimension."""
    if len(runs) == 1:
        return positions + runs[0].start
    starts = torch.tensor([run.start for run in runs], device=positions.device)
    lengths = torch.tensor([len(run) for run in runs], device=positions.device)
    ends = lengths.cumsum(0)
    which = torch.bucketize(positions, ends, right=True)
    return positions + (starts - ends + lengths)[which]
