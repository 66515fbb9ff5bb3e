"""``repeat = "ulp"``: move every initial weight by one unit in the last place.

A rerun of a deterministic set-up is bit-identical and so teaches nothing about rounding. Moving
each weight to a neighbouring floating-point number is a change no larger than rounding itself, so
how far such a run drifts is how far rounding alone can carry a correct one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from harness.rank.hashing import mixed
from harness.rank.names import canonical
from harness.rank.placement import held, local_shard

_BLOCK_ELEMENTS = 1 << 20


@torch.no_grad()
def move_by_one_ulp(model_parts: Iterable[torch.nn.Module], seed: int) -> None:
    """Move each element up or down, by a hash of seed, parameter's name and global index.

    The direction depends on nothing else, so every sharding of the same model is moved to the
    same weights and replicas stay equal. Raises PlacementError where a shard's global indices
    cannot be told.
    """
    for part in model_parts:
        move_tensors(((canonical(name), each) for name, each in part.named_parameters()), seed)


@torch.no_grad()
def move_tensors(parameters: Iterable[tuple[str, Any]], seed: int) -> None:
    """The same for parameters, or flat shards of them, by canonical name."""
    for name, parameter in parameters:
        local = local_shard(parameter)
        flat = local.reshape(-1)
        for block, index in held(parameter).blocks(_BLOCK_ELEMENTS, local.device):
            up = direction(name, index, seed)
            towards = torch.where(up, torch.inf, -torch.inf).to(flat.dtype)
            flat[block] = torch.nextafter(flat[block], towards)
        if not local.is_contiguous():  # then the flat shard is a copy
            local.copy_(flat.view(local.shape))


def direction(name: str, index: torch.Tensor, seed: int) -> torch.Tensor:
    """Per element of a named tensor, by its global flat index (int64): up or down."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return mixed(index, int.from_bytes(digest, "little")) < 0
