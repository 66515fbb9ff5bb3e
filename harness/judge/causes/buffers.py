"""C6 from buffers: state that is not updated by gradients, such as a router's balancing biases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import Context, loss_agrees
from converge_harness.judge.causes.parameter_names import fold, joined
from converge_harness.judge.causes.signature import Basis, Cause, Stage, signature
from converge_harness.judge.compare.post_step_state import buffers as compared
from converge_harness.judge.compare.post_step_state import unchanging, unmoved
from converge_harness.judge.compare.sketches import fit, relative
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.model import BufferRows, CauseClass, Floats

_MULTIPLE = 1e-3
"""Largest relative residual for a buffer to count as a multiple of the control's."""
_LOOK_AT = (
    "what updates these buffers: hooks of the optimizer or of the forward pass that are not "
    "registered, return early or write to a copy, and buffers replaced after they were registered"
)


_TABLES = (
    "what makes these tables (rotary: base, scaling, length, precision), on which ranks and "
    "stages, and whether they are made again after sharding, loading or moving to a device"
)
_OTHER = 0.02
"""A table that is off by less has perhaps been rounded, and need not be the cause."""


class _Buffer(NamedTuple):
    """A buffer that both runs have, at one sample."""

    name: str
    ours: Floats
    """Sketch, shape (k,)."""
    theirs: Floats
    difference: float
    """Relative; infinite where only one of the two is zero."""
    still: bool
    """Whether it has not moved since the sample before, and the control's has."""


@signature(
    Basis.HELD,
    Stage.BUFFERS,
    # Without its update, counts that it would have reduced still differ by rank.
    overrides=("replicas",),
)
def still_buffers(context: Context) -> Cause | None:
    """C6: a buffer is not updated, and is the first difference to the control.

    Asked before replicas: without the update, counts that it would have reduced and reset still
    differ by rank.
    """
    found = _first_apart(context)
    if found is None:
        return None
    sample, buffers = found
    still = [each.name for each in buffers if each.still]
    if not still:
        return None
    names = _text(still, sample)
    verb = "does" if len(still) == 1 else "do"
    sentence = (
        f"buffers do not move: {names} {verb} not change up to step {sample.step}, while "
        "the control's do; gradients and updates agree until then"
    )
    return Cause(sentence, CauseClass.FROZEN, _LOOK_AT)


@signature(
    Basis.FIRST_TENSORS,
    Stage.BUFFERS,
    # Only asked where gradients agree until then.
    overrides=("sampled_gradients",),
)
def other_buffers(context: Context) -> Cause | None:
    """C6: a buffer is updated differently, and nothing differed before."""
    found = _first_apart(context)
    if found is None or any(each.still for each in found[1]):
        return None
    sample, buffers = found
    names = [each.name for each in buffers]
    fits = [fit(each.ours, each.theirs) for each in buffers]
    factors = [each.factor for each in fits if each.residual <= _MULTIPLE]
    worst = max(each.difference for each in buffers)
    alike = len(factors) == len(fits) and np.ptp(factors) <= _MULTIPLE * abs(factors[0])
    how = f"are {factors[0]:.4g} times" if alike else f"are off by up to {worst:.2g} of"
    sentence = (
        f"buffers are updated differently: {_text(names, sample)} {how} the control's at step "
        f"{sample.step}; gradients and updates agree until then"
    )
    return Cause(sentence, CauseClass.UPDATE, _LOOK_AT)


@signature(Basis.EXACT, Stage.FORWARD)
def other_tables(context: Context) -> Cause | None:
    """C4: a buffer that never changes differs, from the first sample on.

    The forward pass uses it as it is. Its difference is exact, whatever losses and gradients hide.
    """
    return _tables(context, _OTHER)


@signature(Basis.LEFT_OVER, Stage.FORWARD)
def rounded_tables(context: Context) -> Cause | None:
    """C4: a buffer that never changes is off by no more than rounding, and nothing else is."""
    return _tables(context, 0.0)


def _tables(context: Context, least: float) -> Cause | None:
    runs, tables = context.compared, unchanging(context.compared.control)
    first = next(compared(runs.tensors, runs.test, runs.control), None)
    if first is None:
        return None
    off = [i for i in first.outside if first.names[i] in tables and first.difference[i] > least]
    begun = context.first_failure()
    sample = context.sample(first.step)
    if not off or sample is None or (begun is not None and begun < first.step):
        return None
    names = [first.names[index] for index in off]
    sentence = (
        f"the forward pass uses other tables: {_text(names, sample)}, which training never "
        f"changes, {'is' if len(names) == 1 else 'are'} off by up to "
        f"{first.difference[off].max():.2g} of the control's at step {first.step}"
        f"{loss_agrees(context, first.step)}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _TABLES)


def _first_apart(context: Context) -> tuple[TensorComparison, list[_Buffer]] | None:
    """The first sample at which updated buffers differ, if no curve or tensor does before."""
    first = context.first_failure()
    runs = context.compared
    tables = unchanging(runs.control)
    outside = {
        each.step: {each.names[index] for index in each.outside}
        for each in compared(runs.tensors, runs.test, runs.control)
    }
    before: TensorComparison | None = None
    for sample in runs.tensors:
        agreed = context.agrees("loss", sample.step) is not False and not any(
            found is not None and found.outside.size
            for found in (sample.initial, sample.gradients, sample.updates)
        )
        if not agreed or (first is not None and first < sample.step):
            return None
        off = outside.get(sample.step, set()) - tables
        differing = [each for each in _buffers(sample, before) if each.name in off]
        if differing:
            return sample, differing
        before = sample
    return None


def _text(names: Sequence[str], sample: TensorComparison) -> str:
    among = sample.control.buffers.names if sample.control.buffers is not None else ()
    return joined(fold(names, among))


def _buffers(sample: TensorComparison, before: TensorComparison | None) -> Iterator[_Buffer]:
    ours, theirs = sample.test.buffers, sample.control.buffers
    if ours is None or theirs is None:
        return
    for row, name in enumerate(theirs.names):
        if name not in ours.names:
            continue
        place = ours.names.index(name)
        mine, other = ours.sketch[place], theirs.sketch[row]
        norms = ours.norm[place : place + 1], theirs.norm[row : row + 1]
        difference = float(relative((mine - other)[np.newaxis], *norms)[0])
        stood = _same(before.test.buffers if before else None, name, mine)
        moved = not _same(before.control.buffers if before else None, name, other)
        yield _Buffer(name, mine, other, difference, stood and moved)


def _same(rows: BufferRows | None, name: str, sketch: Floats) -> bool:
    """Whether a buffer has its earlier value; without one, whether it is still all zeros."""
    if rows is None or name not in rows.names:
        return not sketch.any()
    return unmoved(rows, name, sketch)
