"""Sketches of buffers at a sampled step, such as a router's biases or running statistics.

A buffer is whole on many ranks, in several pipeline stages and replicas; each is counted once.
Whether copies agree is checked in ``converge_harness.rank.recorder.replicas``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.cross_entropy import local_part
from converge_harness.rank.recorder.grad_norm import assign_shards
from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.placement import (
    Held,
    HeldRun,
    PlacementError,
    held,
    local_shard,
)
from converge_harness.rank.recorder.sketch import (
    SQUARES,
    WIDTH,
    HashedPart,
    ShardHash,
    Sketcher,
    folded,
    hashed_parts,
)
from converge_harness.run_folder import arrays as contract

LARGEST = 1 << 24
"""Largest number of entries of a buffer that is sketched: a longer table is computed, not
learnt."""


class _Owned(NamedTuple):
    """A buffer, or a shard of one, that this rank counts."""

    row: int
    part: torch.nn.Module
    name: str
    """Its name in ``part``: a buffer may be replaced by another tensor at any time."""
    held: Held | HeldRun
    parts: tuple[HashedPart, ...]


class BufferSampler:
    """A rank's part of the buffers' rows. The constructor is collective over the world."""

    def __init__(
        self,
        model_parts: Sequence[torch.nn.Module],
        device: torch.device,
        *,
        persistent: bool = False,
    ) -> None:
        """``persistent``: only the buffers that a checkpoint of the model has."""
        mine: dict[str, tuple[torch.nn.Module, str, torch.Tensor]] = {}
        for part in model_parts:
            left_out = set(_not_persistent(part)) if persistent else set()
            for name, buffer in part.named_buffers():
                if _readable(buffer) and name not in left_out:
                    mine.setdefault(canonical(name), (part, name, _as_real(buffer)))
        counted = _alike_everywhere({name: tuple(each[2].shape) for name, each in mine.items()})
        shards = assign_shards([(name, mine[name][2]) for name in mine if name in counted])
        self.names = shards.names
        """Canonical names of the buffers of the whole model, sorted."""
        self.sizes = shards.sizes
        """Entries of each whole buffer; a complex entry is two."""
        self._device = device
        self._owned: list[_Owned] = []
        for row, buffer in shards.owned:
            part, name, _ = mine[self.names[row]]
            try:
                held_here = held(buffer)
            except PlacementError:
                continue
            parts = hashed_parts(self.names[row], held_here, device)
            self._owned.append(_Owned(row, part, name, held_here, parts))
        owned_rows = {each.row for each in self._owned}
        self._placeless = [row for row, _ in shards.owned if row not in owned_rows]

    @torch.no_grad()
    def finish(self, sketcher: Sketcher) -> torch.Tensor:
        """This rank's summands of sketches and squares: shape (buffers, PROJECTIONS + 1), float64.

        A buffer that is gone, or whose shape has changed since training began, has NaN.
        """
        added = torch.zeros(len(self.names), WIDTH, dtype=torch.float64, device=self._device)
        without_value = list(self._placeless)
        values: list[tuple[int, ShardHash, torch.Tensor]] = []
        now = {id(part): dict(part.named_buffers()) for part in {each.part for each in self._owned}}
        for each in self._owned:
            buffer = now[id(each.part)].get(each.name)
            shard = local_shard(_as_real(buffer)) if buffer is not None else None
            if shard is None or not each.held.fits(tuple(shard.shape)):
                without_value.append(each.row)
            else:
                values += [(each.row, part.hash, part.of(shard)) for part in each.parts]
        sketcher.add(values, added)
        added[without_value] = math.nan
        return torch.cat([folded(added), added[:, SQUARES, None]], dim=1)

    def arrays(self, table: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of the file from the sum of all ranks' rows."""
        return contract.buffers(
            self.names,
            self.sizes,
            norm=np.sqrt(table[:, contract.PROJECTIONS]),
            sketch=table[:, : contract.PROJECTIONS],
        )


def _not_persistent(part: torch.nn.Module) -> Iterator[str]:
    """Names, in a part of the model, of buffers that are no part of its state_dict."""
    for prefix, module in part.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name


def _readable(buffer: torch.Tensor) -> bool:
    """Whether entries can be read: not on the meta device, and not complex numbers in shards."""
    cut = isinstance(buffer, DTensor) and not all(each.is_replicate() for each in buffer.placements)
    return not buffer.is_meta and buffer.numel() <= LARGEST and not (buffer.is_complex() and cut)


def _as_real(buffer: torch.Tensor) -> torch.Tensor:
    """A complex buffer, which is never sharded, as pairs of real numbers."""
    return torch.view_as_real(local_part(buffer)) if buffer.is_complex() else buffer


def _alike_everywhere(shapes: dict[str, tuple[int, ...]]) -> set[str]:
    """Names of buffers with the same shape on all ranks that have them. Collective.

    If shapes differ, the buffers are manual shards, or unrelated.
    """
    found: dict[str, set[tuple[int, ...]]] = {}
    for some in world.everyones(shapes):
        for name, shape in some.items():
            found.setdefault(name, set()).add(shape)
    return {name for name, different in found.items() if len(different) == 1}
