"""A shard that is a run of consecutive entries of the flattened whole tensor.

FSDP 1 and DeepSpeed's ZeRO shard tensors like this, and keep the pieces in buffers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from converge_harness.rank.recorder.fetched_shard import FetchedShard, FetchedShardError


class FlatShard(FetchedShard):
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
        """Set which entries are held, and how to fetch them (``FetchedShard``).

        Args:
            whole: shape of the whole tensor.
            start: first entry held.
            stop: one after the last; equal to ``start`` if nothing is held.
            value, gradient, states: tensors of any shape with ``stop - start`` entries.
        """
        super().__init__(whole, value, gradient, states)
        self.start = start
        self.stop = stop
        if not 0 <= start <= stop <= self.numel():
            raise FetchedShardError(f"entries {start} to {stop} are not in shape {self.shape}")

    @property
    def entries(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> tuple[tuple[str, int], ...]:
        if self.is_whole:
            return ()
        return ("start", self.start), ("stop", self.stop)

    def local(self) -> torch.Tensor:
        """The entries, shape (stop - start,).

        Raises FetchedShardError when there are fewer or more.
        """
        value = self._value().detach().reshape(-1)
        if value.numel() != self.entries:
            raise FetchedShardError(
                f"a shard of entries {self.start} to {self.stop} of shape {tuple(self.shape)} now "
                f"has {value.numel()} entries"
            )
        return value

    def _alike(self, value: torch.Tensor) -> FlatShard:
        return FlatShard(self.shape, self.start, self.stop, lambda: value)
