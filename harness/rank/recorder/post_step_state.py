"""The state after a sampled step: clipped gradients and optimizer states.

Only norms, by the rows of the samples (``rows``); sums over ranks give those of the whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.fetched_shard import FetchedShard
from converge_harness.rank.recorder.grad_norm import SquareSums, placement_problem
from converge_harness.rank.recorder.placement import local_shard
from converge_harness.rank.recorder.rows import Rows
from converge_harness.run_folder.arrays import CLIPPED_NORM, optimizer_states

STEP = "step"
"""Name of the state with the number of updates per parameter in torch's optimizers."""
_FIRST_STATE = 2
"""Column of the first state, after the clipped gradient and the counter."""


class PostStepRows(NamedTuple):
    """This rank's summands of the rows of the whole tensors."""

    states: tuple[str, ...]
    """Names of all states of a parameter's shape, sorted; the same on all ranks."""
    rows: torch.Tensor
    """float64, shape (rows, 2 + states): the sum of squares of the clipped gradient, the
    optimizer's counter times the entries of the shard, the sums of squares of the states."""


class PostStepSampler:
    """A rank's part of the state after clipping and the optimizer's step."""

    def __init__(
        self,
        rows: Rows,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._optimizers = optimizers
        self._device = device

    @torch.no_grad()
    def finish(self) -> PostStepRows:
        """This rank's rows, with NaN if there is nothing to count. Collective over the world."""
        kept_for = states_of(self._optimizers)
        # Optimizers have no states for a shard without entries.
        shards = [
            (shard, kept_for.get(id(shard.parameter), {}))
            for shard in self._rows.shards
            if shard.numel
        ]
        states = _everyones_names(
            name
            for shard, kept in shards
            for name, value in kept.items()
            if _shaped_like(shard.parameter, value)
        )
        width = _FIRST_STATE + len(states)
        absent = [row * width + column for row in self._rows.unknown for column in range(width)]
        counters: list[tuple[int, int, Any]] = []
        tensors: list[tuple[int, torch.Tensor]] = []
        for shard, kept in shards:
            first, parameter = shard.row * width, shard.parameter
            gradient = parameter.grad
            if gradient is None or placement_problem(parameter, gradient):
                absent.append(first)
            else:
                tensors.append((first, shard.of(local_shard(gradient))))
            counters.append((first + 1, shard.numel, kept.get(STEP, math.nan)))
            for column, name in enumerate(states, _FIRST_STATE):
                value = kept.get(name)
                if _shaped_like(parameter, value):
                    tensors.append((first + column, shard.of(local_shard(value))))
                else:
                    absent.append(first + column)
        cells = SquareSums(tensors, len(self._rows.names) * width).numbers()
        for (cell, entries, _), counter in zip(counters, _numbers(counters), strict=True):
            cells[cell] += entries * counter
        for cell in absent:
            cells[cell] = math.nan
        rows = torch.tensor(cells, dtype=torch.float64, device=self._device)
        return PostStepRows(states, rows.view(-1, width))

    def arrays(self, states: Sequence[str], table: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of the file from the sum of all ranks' rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            steps = table[:, 1] / np.array(self._rows.sizes, dtype=np.float64)
        return {
            CLIPPED_NORM: np.sqrt(table[:, 0]),
            **optimizer_states(states, norm=np.sqrt(table[:, _FIRST_STATE:]), steps=steps),
        }


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Mapping[str, Any]]:
    """The current optimizer states of each parameter, by the parameter's ``id``."""
    return {
        id(parameter): state
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
    }


def _everyones_names(mine: Iterable[str]) -> tuple[str, ...]:
    """The names of all ranks, sorted. Collective over the world."""
    names = sorted({str(name) for name in mine})
    return tuple(sorted({name for some in world.everyones(names) for name in some}))


def _shaped_like(parameter: torch.Tensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor | FetchedShard) and value.shape == parameter.shape


def _numbers(counters: Sequence[tuple[int, int, Any]]) -> list[float]:
    """The counters as numbers, in one transfer from each device."""
    values = [value for *_, value in counters]
    found = [float(value) if isinstance(value, int | float) else math.nan for value in values]
    kept: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            wide = local_shard(value).double().reshape(())
            where, there = kept.setdefault(wide.device, ([], []))
            where.append(place)
            there.append(wide)
    for where, there in kept.values():
        for place, number in zip(where, torch.stack(there).tolist(), strict=True):
            found[place] = number
    return found
