"""``repeat = "ulp"``: move every initial weight by one unit in the last place.

A rerun of a deterministic set-up is bit-identical and so teaches nothing about rounding. Moving
each weight to a neighbouring floating-point number is a change no larger than rounding itself, so
how far such a run drifts is how far rounding alone can carry a correct one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.rank.cross_entropy import local_part
from harness.rank.names import canonical

_BLOCK_ELEMENTS = 1 << 22


@torch.no_grad()
def move_by_one_ulp(model_parts: Iterable[torch.nn.Module]) -> None:
    """Move each element up or down, by a hash of its parameter's name and its global index.

    The direction depends on nothing else, so every sharding of the same model is moved to the
    same weights and replicas stay equal.
    """
    for part in model_parts:
        for name, parameter in part.named_parameters():
            local = local_part(parameter)
            shape, offset = _place(parameter)
            if local.numel():
                _move(local.data, canonical(name), tuple(parameter.shape), shape, offset)


def _place(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard and where it begins in the whole tensor."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.ndim
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(offset)


def _move(
    local: torch.Tensor,
    name: str,
    whole: tuple[int, ...],
    shape: tuple[int, ...],
    offset: tuple[int, ...],
) -> None:
    # One row of the first dimension at a time would be slow, all at once would need eight bytes
    # an element: so blocks of rows.
    flat = local.reshape(shape).view(shape[0] if shape else 1, -1)
    width = flat.shape[1]
    columns = _global_index((1, *whole[1:]), (1, *shape[1:]), (0, *offset[1:]), local.device)
    row_stride = 1
    for size in whole[1:]:
        row_stride *= size
    rows = max(1, _BLOCK_ELEMENTS // max(1, width))
    first = offset[0] if offset else 0
    for start in range(0, len(flat), rows):
        block = flat[start : start + rows]
        row = torch.arange(len(block), device=local.device) + first + start
        index = row.unsqueeze(1) * row_stride + columns.unsqueeze(0)
        up = direction(name, index)
        towards = torch.where(up, torch.inf, -torch.inf).to(block.dtype)
        block.copy_(torch.nextafter(block, towards))


def direction(name: str, index: torch.Tensor) -> torch.Tensor:
    """Per element of a named tensor, by its global flat index (int64): up or down.

    The top bit of one multiply-xorshift round (Steele et al., SplitMix64), computed with int64
    arithmetic that wraps.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    mixed = index * _signed(0x9E3779B97F4A7C15) + int.from_bytes(digest, "little", signed=True)
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return mixed < 0


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed number that int64 tensors hold."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _global_index(
    whole: tuple[int, ...], shape: tuple[int, ...], offset: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Flat indices, in the whole tensor, of a shard's elements."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, length, begin in zip(whole, shape, offset, strict=True):
        along = torch.arange(length, device=device) + begin
        index = (index.unsqueeze(-1) * size + along).reshape(*index.shape, length)
    return index.flatten()
