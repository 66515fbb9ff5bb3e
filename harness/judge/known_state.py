"""Whether what was saved and loaded says anything: what is on neither side is equal, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.judge.passes import Load
from harness.model import Evidence, StateSample, TensorSample, UpdateRows


def says_nothing(load: Load, test: Evidence, control: Evidence) -> str:
    """What of a state nothing tells, in a clause; empty when all that is known to be there is told.

    Known are the tensors and optimizer states of the samples that the run, else its control, left
    up to the step of the checkpoint: a state that the optimizer has begun to keep it goes on to.
    """
    sources = [each.samples for each in (test, control) if each.samples]
    samples = sources[0] if sources else ()
    left = next((each for each in (_left(every, load.step) for every in sources) if each), None)
    for state, when in ((load.saved, "as it was saved"), (load.into.loaded, "as it was loaded")):
        if state is None:
            continue
        words = next(_empty(state, samples[0] if samples else None, left), "")
        if words:
            return f"{words} {when}"
    return ""


def _left(samples: tuple[TensorSample, ...], step: int) -> TensorSample | None:
    """The last sample up to a step with what a step leaves behind its gradients."""
    found = [each for each in samples if each.left is not None and 0 < each.step <= step]
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
    if left is not None and left.left is not None:
        yield from _empty_states(state, left, left.left)


def _empty_states(state: StateSample, sample: TensorSample, kept: UpdateRows) -> Iterator[str]:
    """Optimizer states and counts of updates that a sample has, and a state has not."""
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
        told = np.isfinite(norm) & np.isfinite(sketch).all(axis=1)
        untold = np.flatnonzero(np.isfinite(before) & ~told)
        if untold.size:
            yield f"{name} of {names[untold[0]]}"
        if (before > 0).any() and not (norm > 0).any():
            yield f"{name} of any parameter but 0"
    uncounted = np.isfinite(kept.state_steps[shared]) & ~np.isfinite(state.state_steps[rows])
    if uncounted.any():
        yield f"the optimizer's updates of {names[np.flatnonzero(uncounted)[0]]}"
