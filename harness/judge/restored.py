"""What a pass loaded against what was saved, by sketch: exact whatever the sharding of either."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.judge.sketches import relative
from harness.model import Flags, Floats, Integers, StateSample

PARAMETERS = "parameters"
RESTORED = 1e-12
"""A tensor after a load, relative to its norm: the same bits, whose sums in float64 are taken in
another order when the sharding is another."""


class Part(NamedTuple):
    """Parameters, or one state of the optimizer, as they came back."""

    name: str
    tensors: tuple[str, ...]
    difference: Floats
    """Shape (tensors,): relative to the norm; infinite for one that is missing on one side."""

    @property
    def off(self) -> Integers:
        """Indices of tensors that did not come back, the furthest first."""
        off = np.flatnonzero(~(self.difference <= RESTORED))
        return off[np.argsort(-self.difference[off], kind="stable")]


def parts(saved: StateSample, loaded: StateSample) -> list[Part]:
    """Every part of a state, those of the optimizer in the order of their names."""
    names = tuple(sorted({*saved.names, *loaded.names}))
    rows, others = _places(saved.names, names), _places(loaded.names, names)
    kinds = {PARAMETERS: (_parameters(saved, rows), _parameters(loaded, others))}
    kinds |= {
        state: (_state(saved, state, rows), _state(loaded, state, others))
        for state in sorted({*saved.states, *loaded.states})
    }
    return [Part(kind, names, _difference(before, now)) for kind, (before, now) in kinds.items()]


class _Rows(NamedTuple):
    """One kind of tensor, a row per parameter; NaN where there is none."""

    sketch: Floats
    norm: Floats
    kept: Flags
    """Where there should be one: the optimizer keeps no state of a parameter without gradient."""


def _difference(before: _Rows, now: _Rows) -> Floats:
    """Shape (parameters,): by sketch and by norm, whichever is more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        by_norm = np.abs(now.norm - before.norm) / np.minimum(now.norm, before.norm)
    by_norm = np.where(now.norm == before.norm, 0.0, by_norm)
    by_sketch = relative(now.sketch - before.sketch, before.norm, now.norm)
    return np.where(before.kept | now.kept, np.fmax(by_sketch, by_norm), 0.0)


def _parameters(sample: StateSample, rows: Integers) -> _Rows:
    values = sample.parameters
    kept = np.ones(rows.size, dtype=np.bool_)
    return _Rows(_taken(values.sketch, rows), _taken(values.norm, rows), kept)


def _state(sample: StateSample, state: str, rows: Integers) -> _Rows:
    if state not in sample.states:
        nothing = np.full(rows.size, np.nan)
        width = sample.state_sketch.shape[2]
        return _Rows(np.full((rows.size, width), np.nan), nothing, np.isfinite(nothing))
    column = sample.states.index(state)
    norm = _taken(sample.state_norm[:, column], rows)
    return _Rows(_taken(sample.state_sketch[:, column], rows), norm, ~np.isnan(norm))


def _places(names: tuple[str, ...], wanted: tuple[str, ...]) -> Integers:
    """Where each wanted name is; -1 where it is not."""
    places = {name: index for index, name in enumerate(names)}
    return np.array([places.get(name, -1) for name in wanted], dtype=np.int64)


def _taken(values: Floats, rows: Integers) -> Floats:
    """Rows of an array; NaN where there is none."""
    taken = values[np.maximum(rows, 0)].astype(np.float64)
    taken[rows < 0] = np.nan
    return taken
