"""Matrices that one parameter holds together, as torchtitan's ``wqkv`` holds queries, keys, values.

At initial weights the gradient of the values is a hundred times as long as those of queries and
keys, and hides them. Apart, each has a sketch and a norm of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.rank.placement import Held


@dataclass(frozen=True, slots=True)
class Fused:
    """How the rows of a parameter are shared out: in blocks, by a pattern that repeats."""

    names: tuple[str, ...]
    """Canonical names of the matrices."""
    block: int
    """Rows that follow each other, of one matrix."""
    pattern: tuple[int, ...]
    """Index into ``names`` of each block of a period."""

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Index into ``names`` of each row of the whole parameter."""
        pattern = torch.tensor(self.pattern, device=rows.device)
        return pattern[rows // self.block % len(self.pattern)]

    def sizes(self, whole: int) -> dict[str, int]:
        """Entries of each matrix, of a parameter with ``whole`` entries."""
        return {
            name: whole * self.pattern.count(number) // len(self.pattern)
            for number, name in enumerate(self.names)
        }


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a shard holds of one of the matrices."""

    number: int
    """Index into ``Fused.names``."""
    rows: torch.Tensor
    """Shape (rows,), int64: its rows of the shard."""
    held: Held
    """Those rows, of the matrix as a tensor of its own."""


def matrices(fused: Fused, held: Held) -> Sequence[Matrix]:
    """The parts of a shard that belong to each of the matrices, whatever the sharding."""
    of_whole = fused.of_rows(torch.arange(held.whole[0]))
    leading, _ = held.divided(1)
    here = leading.flat_index(0, leading.numel, "cpu")
    found = []
    for number in range(len(fused.names)):
        belongs = of_whole == number
        rows = torch.nonzero(belongs[here]).flatten()
        # Row r of the whole is that row of the matrix of which as many come before.
        places = (belongs.cumsum(0) - 1)[here[rows]]
        whole = (int(belongs.sum()), *held.whole[1:])
        found.append(Matrix(number, rows, Held(whole, (_runs(places), *held.runs[1:]))))
    return found


def _runs(places: torch.Tensor) -> tuple[range, ...]:
    """Ascending places as runs of such that follow each other."""
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
