"""What ranks do together; in a program without a process group, what one process does alone.

A plain script has no process group, and must not find one that it did not make.
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
    """Every rank's row of as many numbers, in rank order. Collective over the world.

    float64, shape (ranks, numbers), on ``device``: of a large world few ranks read all of it.
    """
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    if not dist.is_initialized():
        return mine[None]
    everyone = mine.new_empty(size() * len(row))
    # torch 2.13 warns of the older name, which is all that releases before have.
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
