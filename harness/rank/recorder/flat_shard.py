"""A shard that is a run of consecutive entries of the flattened whole tensor.

FSDP 1 and DeepSpeed's ZeRO shard tensors like this, and keep the pieces in buffers of their own. A
flat shard can be used wherever the rank code expects a tensor, like a DTensor: ``shape`` is the
whole tensor's, ``grad`` the same run of its gradient, and ``placement.local_shard`` returns the
entries. They are fetched anew each time, because the buffers may be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


class FlatShardError(Exception):
    """The fetched entries do not match the shard."""


class FlatShard:
    """Entries ``start`` to ``stop`` of a whole tensor, flattened in row-major order."""

    def __init__(
        self,
        whole: Iterable[int],
        start: int,
        stop: int,
        value: Callable[[], torch.Tensor],
        gradient: Callable[[], torch.Tensor | None] = lambda: None,
        states: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Set which entries are held, and how to fetch them.

        Args:
            whole: shape of the whole tensor.
            start: first entry held.
            stop: one after the last; equal to ``start`` if nothing is held.
            value: returns a plain tensor of any shape with ``stop - start`` entries.
            gradient: returns the same entries of the gradient; None while there is none.
            states: returns the optimizer states of these entries by name (``exp_avg``, ``step``):
            plain tensors with ``stop - start`` entries, and numbers.

        These functions must not call collectives or change anything.
        """
        self.shape = torch.Size(whole)
        self.start = start
        self.stop = stop
        self._value = value
        self._gradient = gradient
        self._states = states
        if not 0 <= start <= stop <= self.numel():
            raise FlatShardError(f"entries {start} to {stop} are not in shape {self.shape}")

    def numel(self) -> int:
        """Entries of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.numel()

    def local(self) -> torch.Tensor:
        """The entries, shape (stop - start,).

        Raises FlatShardError when there are fewer or more.
        """
        value = self._value().detach().reshape(-1)
        if value.numel() != self.stop - self.start:
            raise FlatShardError(
                f"a shard of entries {self.start} to {self.stop} of shape {tuple(self.shape)} now "
                f"has {value.numel()} entries"
            )
        return value

    @property
    def grad(self) -> FlatShard | None:
        """The same entries of the gradient."""
        gradient = self._gradient()
        return None if gradient is None else self._alike(gradient)

    def kept(self) -> dict[str, Any]:
        """The optimizer states: tensors with as many entries as flat shards, others unchanged."""
        return {
            name: self._alike(value)
            if isinstance(value, torch.Tensor)
            and value.numel() == self.stop - self.start
            and value.ndim > 0
            else value
            for name, value in self._states().items()
        }

    def _alike(self, value: torch.Tensor) -> FlatShard:
        return FlatShard(self.shape, self.start, self.stop, lambda: value)


class FlatOptimizer:
    """The optimizer states of flat shards, for code that expects an optimizer."""

    def __init__(self, shards: Iterable[FlatShard]) -> None:
        self._shards = tuple(shards)

    @property
    def state(self) -> dict[FlatShard, dict[str, Any]]:
        """The current states."""
        return {shard: shard.kept() for shard in self._shards}
