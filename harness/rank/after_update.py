"""What a sampled step leaves behind: gradients as they were clipped, and the optimizer's state.

Norms only, through the shards that a rank counts in the gradient norm; the sums over ranks are
those of the whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from harness.rank import world
from harness.rank.flat_shard import FlatShard
from harness.rank.grad_norm import GradNorm, placement_problem, square_sums
from harness.rank.placement import local_shard

STEP = "step"
"""Under which torch's optimizers keep the number of their updates, per parameter."""
_FIRST_STATE = 2
"""Column of the first state, after the clipped gradient and the counter."""


class Leftovers(NamedTuple):
    """What this rank adds to the rows of the whole parameters."""

    states: tuple[str, ...]
    """Names of all states of a parameter's shape, sorted; the same on all ranks."""
    rows: torch.Tensor
    """float64, shape (parameters, 2 + states): the sum of squares of the clipped gradient, the
    optimizer's counter times the entries of the shard, the sums of squares of the states."""


class AfterUpdate:
    """A rank's part of what clipping and the optimizer left."""

    def __init__(
        self,
        norm: GradNorm,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        """``norm`` says which shards this rank counts."""
        self._norm = norm
        self._optimizers = optimizers
        self._device = device

    @torch.no_grad()
    def finish(self) -> Leftovers:
        """Rows with NaN where there is nothing to count. Collective over the world."""
        kept_for = states_of(self._optimizers)
        shards: list[tuple[int, torch.Tensor, int, Mapping[str, Any]]] = []
        for row, parameter in self._norm.owned:
            entries = local_shard(parameter).numel()
            if entries:  # optimizers keep nothing for a shard without entries
                shards.append((row, parameter, entries, kept_for.get(id(parameter), {})))
        states = _everyones_names(
            name
            for _, parameter, _, kept in shards
            for name, value in kept.items()
            if _shaped_like(parameter, value)
        )
        width = _FIRST_STATE + len(states)
        absent: list[int] = []
        counters: list[tuple[int, int, Any]] = []
        tensors: list[tuple[int, torch.Tensor]] = []
        for row, parameter, entries, kept in shards:
            gradient = parameter.grad
            if gradient is None or placement_problem(parameter, gradient):
                absent.append(row * width)
            else:
                tensors.append((row * width, local_shard(gradient)))
            counters.append((row * width + 1, entries, kept.get(STEP, math.nan)))
            for column, name in enumerate(states, _FIRST_STATE):
                value = kept.get(name)
                if _shaped_like(parameter, value):
                    tensors.append((row * width + column, local_shard(value)))
                else:
                    absent.append(row * width + column)
        cells = square_sums(tensors, len(self._norm.names) * width)
        for (cell, entries, _), counter in zip(counters, _numbers(counters), strict=True):
            cells[cell] += entries * counter
        for cell in absent:
            cells[cell] = math.nan
        rows = torch.tensor(cells, dtype=torch.float64, device=self._device)
        return Leftovers(states, rows.view(-1, width))

    def arrays(self, states: Sequence[str], table: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of the file from the sum of all ranks' rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            steps = table[:, 1] / np.array(self._norm.sizes, dtype=np.float64)
        return {
            "clipped_norm": np.sqrt(table[:, 0]),
            "state_names": np.array(states, dtype=np.str_),
            "state_norm": np.sqrt(table[:, _FIRST_STATE:]),
            "state_steps": steps,
        }


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, Mapping[str, Any]]:
    """What optimizers keep now for each parameter, by the parameter's ``id``."""
    return {
        id(parameter): state
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
    }


def _everyones_names(mine: Iterable[str]) -> tuple[str, ...]:
    """Names that any rank has, sorted. Collective over the world."""
    names = sorted({str(name) for name in mine})
    return tuple(sorted({name for some in world.everyones(names) for name in some}))


def _shaped_like(parameter: torch.Tensor, value: Any) -> bool:
    return isinstance(value, torch.Tensor | FlatShard) and value.shape == parameter.shape


def _numbers(counters: Sequence[tuple[int, int, Any]]) -> list[float]:
    """The counters as numbers, in one transfer from the device."""
    values = [value for *_, value in counters]
    found = [float(value) if isinstance(value, int | float) else math.nan for value in values]
    where = [
        place
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.numel() == 1
    ]
    if where:
        wide = [local_shard(values[place]).double().reshape(()) for place in where]
        for place, number in zip(where, torch.stack(wide).tolist(), strict=True):
            found[place] = number
    return found
