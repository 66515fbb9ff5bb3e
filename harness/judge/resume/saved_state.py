"""What a pass loaded against what was saved, by sketch: exact whatever the sharding of either.

Tensors that neither side has would be equal, too; so :func:`says_nothing` asks whether both are
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.sketches import relative
from converge_harness.judge.resume.passes import Load
from converge_harness.model import (
    BufferRows,
    Evidence,
    Flags,
    Floats,
    Integers,
    PostStepState,
    StateSample,
    TensorSample,
)

PARAMETERS = "parameters"
BUFFERS = "buffers"
RESTORED = 1e-12
"""Difference of a tensor after a load, relative to its norm: the bits are the same, but with
another sharding their sums in float64 have another order."""


class StatePart(NamedTuple):
    """Parameters, one state of the optimizer, or buffers, as they were restored."""

    name: str
    tensors: tuple[str, ...]
    difference: Floats
    """Shape (tensors,): relative to the norm; infinite for one that is missing on one side."""
    not_finite: int = 0
    """Tensors that are not compared: they were not finite as saved, nor as loaded."""

    @property
    def off(self) -> Integers:
        """Indices of tensors that were not restored, the largest difference first."""
        off = np.flatnonzero(~(self.difference <= RESTORED))
        return off[np.argsort(-self.difference[off], kind="stable")]


def parts(saved: StateSample, loaded: StateSample) -> list[StatePart]:
    """Every part of a state, those of the optimizer in the order of their names."""
    names = tuple(sorted({*saved.names, *loaded.names}))
    rows, others = _places(saved.names, names), _places(loaded.names, names)
    kinds = {PARAMETERS: (_parameters(saved, rows), _parameters(loaded, others))}
    kinds |= {
        state: (_state(saved, state, rows), _state(loaded, state, others))
        for state in sorted({*saved.states, *loaded.states})
    }
    found = [
        StatePart(kind, names, _difference(before, now)) for kind, (before, now) in kinds.items()
    ]
    if saved.buffers is None or loaded.buffers is None:  # older runs do not record them
        return found
    return [*found, *_buffers(saved.buffers, loaded.buffers)]


def _buffers(saved: BufferRows, loaded: BufferRows) -> list[StatePart]:
    """The buffers as one part; none where the model has none.

    A mask may hold -inf, and one whose shape has changed is recorded as NaN: sketches of such
    buffers say nothing. One that is finite on one side only is off.
    """
    names = tuple(sorted({*saved.names, *loaded.names}))
    before, now = (
        _Rows(_taken(each.sketch, rows), norm, np.isfinite(norm))
        for each in (saved, loaded)
        for rows in (_places(each.names, names),)
        for norm in (_taken(each.norm, rows),)
    )
    not_finite = int(np.count_nonzero(~(before.kept | now.kept)))
    part = StatePart(BUFFERS, names, _difference(before, now), not_finite)
    return [part] if names else []


class _Rows(NamedTuple):
    """One kind of tensor, a row per parameter; NaN where there is none."""

    sketch: Floats
    norm: Floats
    kept: Flags
    """Where there should be one: the optimizer has no state for a parameter without gradient."""


def _difference(before: _Rows, now: _Rows) -> Floats:
    """Shape (parameters,): by sketch and by norm, whichever is more."""
    with np.errstate(divide="ignore", invalid="ignore"):
        by_norm = np.abs(now.norm - before.norm) / np.minimum(now.norm, before.norm)
        sketch = now.sketch - before.sketch
    by_norm = np.where(now.norm == before.norm, 0.0, by_norm)
    by_sketch = relative(sketch, before.norm, now.norm)
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
    taken = np.full((rows.size, *values.shape[1:]), np.nan)
    taken[rows >= 0] = values[rows[rows >= 0]]
    return taken


def says_nothing(load: Load, test: Evidence, control: Evidence) -> str:
    """What of a state is not known, in a clause; empty when all that should be there is known.

    What should be there are the tensors and optimizer states of the samples that the run, else its
    control, left up to the step of the checkpoint: an optimizer never drops a state again.
    """
    sources = [each.samples for each in (test, control) if each.samples]
    samples = sources[0] if sources else ()
    left = next((each for each in (_left(every, load.step) for every in sources) if each), None)
    for state, when in ((load.saved, "as it was saved"), (load.into.loaded, "as it was loaded")):
        if state is None:
            continue
        text = next(_empty(state, samples[0] if samples else None, left), "")
        if text:
            return f"{text} {when}"
    return ""


def _left(samples: tuple[TensorSample, ...], step: int) -> TensorSample | None:
    """The last sample up to a step that has post-step state."""
    found = [each for each in samples if each.post_step is not None and 0 < each.step <= step]
    return found[-1] if found else None


def _empty(
    state: StateSample, known: TensorSample | None, left: TensorSample | None
) -> Iterator[str]:
    if not state.names:
        yield "the value of any parameter"
    if known is not None:
        missing = sorted({*known.names} - {*state.names})
        more = sorted({*state.names} - {*known.names})
        if missing:
            yield f"the value of {len(missing)} of {len(known.names)} parameters ({missing[0]})"
        if more:
            yield f"what {more[0]} is, of which the run left no sample,"
    values = state.parameters
    unfit = ~np.isfinite(values.norm) | ~np.isfinite(values.sketch).all(axis=1)
    if unfit.any():
        yield f"the value of {state.names[np.flatnonzero(unfit)[0]]}"
    if not (values.norm > 0).any():
        yield "the value of any parameter but 0"
    if left is not None and left.post_step is not None:
        yield from _empty_states(state, left, left.post_step)


def _empty_states(state: StateSample, sample: TensorSample, kept: PostStepState) -> Iterator[str]:
    """Optimizer states and counts of updates that a sample has and a state lacks."""
    places = {name: index for index, name in enumerate(state.names)}
    shared = [index for index, name in enumerate(sample.names) if name in places]
    names = [sample.names[index] for index in shared]
    rows = np.array([places[name] for name in names], dtype=np.int64)
    for column, name in enumerate(kept.states):
        if name not in state.states:
            yield f"{name} of any parameter"
            continue
        place = state.states.index(name)
        norm, sketch = state.state_norm[rows, place], state.state_sketch[rows, place]
        before = kept.state_norm[shared, column]
        found = np.isfinite(norm) & np.isfinite(sketch).all(axis=1)
        missing = np.flatnonzero(np.isfinite(before) & ~found)
        if missing.size:
            yield f"{name} of {names[missing[0]]}"
        if (before > 0).any() and not (norm > 0).any():
            yield f"{name} of any parameter but 0"
    uncounted = np.isfinite(kept.state_steps[shared]) & ~np.isfinite(state.state_steps[rows])
    if uncounted.any():
        yield f"the optimizer's updates of {names[np.flatnonzero(uncounted)[0]]}"
