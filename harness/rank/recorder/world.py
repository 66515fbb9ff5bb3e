"""Collectives, which also work in a single process without a process group.

A plain script has no process group, and the recorder must not create one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def everyones(mine: T) -> list[T]:
    """Every rank's object, in rank order. Collective over the world."""
    everyone = [mine] * size()
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return everyone


def gathered(row: Sequence[float], device: torch.device) -> torch.Tensor:
    """Every rank's row of numbers, all of one length, in rank order. Collective over the world.

    float64, shape (ranks, numbers), on ``device``: of a large world few ranks read all of it.
    """
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    if not dist.is_initialized():
        return mine[None]
    everyone = mine.new_empty(size() * len(row))
    # torch 2.13 warns about the older name, which is the only one in earlier releases.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, mine)
    return everyone.view(-1, len(row))


def add_up_(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, in place. Collective over the world."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def minimum_(tensor: torch.Tensor) -> torch.Tensor:
    """The minimum over ranks, in place. Collective over the world."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor
