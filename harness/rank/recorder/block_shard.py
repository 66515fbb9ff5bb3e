"""A shard that is a block of the whole tensor: along each dimension some runs of coordinates.

Megatron-Core shards tensors like this, and says so in attributes of plain parameters. A gated
feed-forward weight has two runs, since each rank has its rows of both matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from converge_harness.rank.recorder.fetched_shard import FetchedShard, FetchedShardError


class BlockShard(FetchedShard):
    """The entries of a whole tensor whose coordinates are in given runs."""

    def __init__(
        self,
        whole: Iterable[int],
        runs: Iterable[Iterable[range]],
        value: Callable[[], torch.Tensor],
        gradient: Callable[[], torch.Tensor | None] = lambda: None,
        states: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Set which entries are held, and how to fetch them (``FetchedShard``).

        Args:
            whole: shape of the whole tensor.
            runs: per dimension the coordinates held, ascending, in runs that do not touch.
            value, gradient, states: tensors that can be viewed in the block's shape.
        """
        super().__init__(whole, value, gradient, states)
        self.runs = tuple(tuple(each) for each in runs)
        sizes = zip(self.runs, self.shape, strict=True)
        if not all(0 <= run.start <= run.stop <= size for some, size in sizes for run in some):
            raise FetchedShardError(f"coordinates {self.runs} are not in shape {self.shape}")
        self._block = torch.Size(sum(map(len, some)) for some in self.runs)

    @property
    def entries(self) -> int:
        return self._block.numel()

    @property
    def place(self) -> tuple[tuple[str, int], ...]:
        if self.is_whole:
            return ()
        return tuple(
            (f"{end} in dimension {dim}", at)
            for dim, some in enumerate(self.runs)
            for run in some
            for end, at in (("start", run.start), ("stop", run.stop))
        )

    def local(self) -> torch.Tensor:
        """The entries in the block's shape.

        Raises FetchedShardError when there are fewer or more.
        """
        value = self._value().detach()
        if value.numel() != self.entries:
            raise FetchedShardError(
                f"a block of shape {tuple(self._block)} of a tensor of shape {tuple(self.shape)} "
                f"now has {value.numel()} entries"
            )
        return value.view(self._block)

    def _alike(self, value: torch.Tensor) -> BlockShard:
        return BlockShard(self.shape, self.runs, lambda: value)
