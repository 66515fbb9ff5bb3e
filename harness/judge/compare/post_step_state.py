"""Post-step state against the control's: clipping, optimizer state, buffers.

Clipping multiplies all gradients by ``min(1, max_norm / norm)``, one factor for all parameters,
which follows from each run's own gradients: so it is judged exactly, however much two runs have
diverged. The optimizer's moments are averages of gradients, and differ about as gradients do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.experts import SAME_TOKENS, together
from converge_harness.judge.compare.floors import (
    CLIPPED_ALIKE,
    ENTRIES_TURNED,
    GRADIENT_FLOORS,
    LEAST_STATE_LIMIT,
    MULTIPLE_LEAVES,
    MULTIPLE_OFF,
    SAME_BUFFER,
    SAME_WEIGHTS,
    STATE_PER_GRADIENT,
    TENSOR_CEILING,
    coarser,
    spacing,
)
from converge_harness.judge.compare.reported import metric_agreement
from converge_harness.judge.compare.sketches import fit, relative
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.judge.degrees import max_norm
from converge_harness.model import BufferRows, Evidence, Flags, Floats, Precision

_ONE_NORM = 1e-4
"""Relative difference up to which two clipped norms count as clipped to the same norm."""
_FEWEST_CLIPPED = 2
"""In how many samples a control must be clipped to the same norm before that counts as its
max_norm."""
UNCLIPPED = 1e-6
"""A factor nearer to one than this counts as not clipped."""
_FEWEST_SEEN = 2
"""A buffer that is the same in this many samples never changes."""


class Clipping(NamedTuple):
    """How the gradients of one step were clipped."""

    step: int
    names: tuple[str, ...]
    factors: Floats
    """Shape (parameters,): norm after clipping over norm before."""
    norms: Floats
    """Shape (parameters,): norm before clipping."""
    common: float
    """The factor that most share."""
    expected: float
    """What it should be, by the control's largest norm and this run's own norm."""
    most: float | None
    """The largest norm after clipping in the control; None where that does not show it."""
    deviation: Floats
    """Shape (parameters,): how far each factor is from the common one, relative to the control's
    parameter."""
    deviation_limit: float
    """Limit of ``deviation``."""
    common_limit: float
    """Limit of how far ``common`` is from ``expected``, relative."""

    @property
    def odd(self) -> list[int]:
        """Parameters clipped by another factor than most."""
        return [int(index) for index in np.flatnonzero(~(self.deviation <= self.deviation_limit))]

    @property
    def off(self) -> float:
        """How far the common factor is from what it should be, relative."""
        return abs(self.common / self.expected - 1)

    @property
    def wrong(self) -> bool:
        return bool(self.odd) or not self.off <= self.common_limit


class PostStepDifference(NamedTuple):
    """Relative differences of something at one step."""

    step: int
    names: tuple[str, ...]
    difference: Floats
    limit: Floats

    @property
    def outside(self) -> list[int]:
        """Indices outside their limits, the largest excess first."""
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.nan_to_num(self.difference / self.limit, nan=np.inf, posinf=np.inf)
        wrong = np.flatnonzero(~(self.difference <= self.limit))
        return [int(index) for index in wrong[np.argsort(-excess[wrong], kind="stable")]]


def clippings(
    tensors: Sequence[TensorComparison], test: Evidence, control: Evidence
) -> Iterator[Clipping]:
    """At every step at which both runs kept their clipped gradients.

    Takes all samples, also of steps that are not asked about: the largest norm is learnt from them.
    """
    largest = max_norm(control.in_force, control.keys) or _learnt(tensors)
    # The factor of a run follows from its own norm, as far as the trainer's norm is correct; twice,
    # because it is compared with the control's.
    right = 2 * max(metric_agreement(run, "grad_norm")[0] for run in (test, control))
    alike = max(CLIPPED_ALIKE, *(2 * spacing(run, 0.0) for run in (test, control)))
    for sample in tensors:
        ours, theirs = sample.test, sample.control
        if ours.post_step is None or theirs.post_step is None:
            continue
        if ours.gradients is None or theirs.gradients is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            mine = ours.post_step.clipped_norm / ours.gradients.norm
            other = theirs.post_step.clipped_norm / theirs.gradients.norm
        judged = np.flatnonzero(np.isfinite(mine) & np.isfinite(other) & (other > 0))
        norm, control_norm = _total(ours.gradients.norm), _total(theirs.gradients.norm)
        if not judged.size or not np.isfinite(norm + control_norm) or not norm:
            continue
        mine, other = mine[judged], other[judged]
        common, usual = float(np.median(mine)), float(np.median(other))
        if usual < 1 - UNCLIPPED:
            most: float | None = usual * control_norm
        else:
            most = largest
            if most is not None and control_norm > most:
                most = None  # the control does not clip, whatever its config says
        if most is not None:
            expected = min(1.0, most / norm)
        else:  # it may clip beyond the norm that the control left as it is
            expected = min(1.0, max(common, control_norm / norm))
        with np.errstate(divide="ignore", invalid="ignore"):
            deviation = np.abs((mine / common) / (other / usual) - 1)
        yield Clipping(
            sample.step,
            tuple(sample.names[index] for index in judged),
            mine,
            ours.gradients.norm[judged],
            common,
            expected,
            most,
            deviation,
            alike,
            right,
        )


def _learnt(tensors: Sequence[TensorComparison]) -> float | None:
    """The largest norm that the control's clipping leaves, by its samples; None: unknown.

    A program of one's own does not say what it clips to. One clipped sample alone does not show
    that the largest norm stays the same, and a larger norm that was left as it is shows that it
    does not.
    """
    clipped, kept = [], []
    for sample in tensors:
        gradients, after = sample.control.gradients, sample.control.post_step
        if gradients is None or after is None:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = after.clipped_norm / gradients.norm
        factors = factors[np.isfinite(factors) & (factors > 0)]
        norm = _total(gradients.norm)
        if not factors.size:
            continue
        if (usual := float(np.median(factors))) < 1 - UNCLIPPED:
            clipped.append(usual * norm)
        else:
            kept.append(norm)
    if len(clipped) < _FEWEST_CLIPPED:
        return None
    largest = clipped[0]
    agree = np.allclose(clipped, largest, rtol=_ONE_NORM, atol=0.0)
    return largest if agree and max(kept, default=0.0) <= (1 + _ONE_NORM) * largest else None


def unseen(tensors: Sequence[TensorComparison]) -> str:
    """Where the control's clipped gradients are known and the test set's are not; else empty."""
    for sample in tensors:
        ours, theirs = sample.test, sample.control
        if theirs.post_step is None or ours.gradients is None:
            continue
        known = np.isfinite(theirs.post_step.clipped_norm)
        here = (
            ours.post_step.clipped_norm
            if ours.post_step is not None
            else np.full(known.shape, np.nan)
        )
        gone = np.flatnonzero(known & np.isfinite(ours.gradients.norm) & ~np.isfinite(here))
        if gone.size:
            first = sample.names[int(gone[0])]
            return (
                f"at step {sample.step} {gone.size} of {known.size} gradients could not be seen "
                f"after clipping (first: {first}): they were cleared before the step ended, or "
                "are partial sums"
            )
    return ""


def counters(tensors: Sequence[TensorComparison]) -> Iterator[PostStepDifference]:
    """How much the optimizer's counters differ from the control's, in updates; infinite if lost."""
    for sample in tensors:
        ours, theirs = sample.test.post_step, sample.control.post_step
        if ours is None or theirs is None:
            continue
        judged = np.flatnonzero(np.isfinite(theirs.state_steps))
        if not judged.size:
            continue
        off = np.abs(ours.state_steps - theirs.state_steps)[judged]
        names = tuple(sample.names[index] for index in judged)
        yield PostStepDifference(
            sample.step, names, np.nan_to_num(off, nan=np.inf), np.zeros(off.shape)
        )


def states(
    tensors: Sequence[TensorComparison], test: Evidence, control: Evidence
) -> Iterator[tuple[str, PostStepDifference]]:
    """Every state's name, and its norms' relative differences, at every step."""
    precision = coarser(test.precision, control.precision)
    limit: Floats = np.zeros(())
    chaotic: Flags = np.zeros((), dtype=np.bool_)
    for sample in tensors:
        ours, theirs = sample.test.post_step, sample.control.post_step
        limit = np.maximum(limit, _gradient_limit(sample, precision))
        if sample.gradients is not None and sample.gradients.chaotic is not None:
            chaotic = chaotic | sample.gradients.chaotic  # moments still contain it
        if ours is None or theirs is None:
            continue
        allowed = np.clip(STATE_PER_GRADIENT * limit, LEAST_STATE_LIMIT, TENSOR_CEILING)
        for column, name in enumerate(theirs.states):
            there = theirs.state_norm[:, column]
            here = np.full(there.shape, np.nan)
            if name in ours.states:
                here = ours.state_norm[:, ours.states.index(name)]
            judged = np.flatnonzero(np.isfinite(there))
            if judged.size:
                names = tuple(sample.names[index] for index in judged)
                off = _difference(here, there, sample)[judged]
                unjudged = np.broadcast_to(chaotic, there.shape)[judged] & np.isfinite(off)
                limits = np.where(unjudged, np.inf, allowed[judged])
                yield name, PostStepDifference(sample.step, names, off, limits)


def buffers(
    tensors: Sequence[TensorComparison], test: Evidence, control: Evidence
) -> Iterator[PostStepDifference]:
    """Buffers that both runs have: tables relative to their norm, others to how far they move.

    Buffers that are zero in the control at every sample (counts cleared in each step) are left out.
    """
    rounded = SAME_BUFFER + max(spacing(run, 0.0) for run in (test, control))
    still, pace = unchanging(control), _pace(control)
    for sample in tensors:
        ours, theirs = sample.test.buffers, sample.control.buffers
        if ours is None or theirs is None:
            continue
        names = tuple(
            name
            for name, norm in zip(theirs.names, theirs.norm, strict=True)
            if name in ours.names and np.isfinite(norm) and pace.get(name, 0.0) > 0
        )
        if not names:
            continue
        here = [ours.names.index(name) for name in names]
        there = [theirs.names.index(name) for name in names]
        difference = ours.sketch[here] - theirs.sketch[there]
        of_norm = relative(difference, ours.norm[here], theirs.norm[there])
        lost = (ours.norm[here] == 0) & (theirs.norm[there] > 0)
        step = max(sample.step, 1)
        reach = step * np.array([pace[name] for name in names])
        moved = np.linalg.norm(difference, axis=1) / reach
        of_pace = np.where(lost | ~np.isfinite(moved), np.inf, moved)
        table = np.array([name in still for name in names])
        fits = [fit(ours.sketch[a], theirs.sketch[b]) for a, b in zip(here, there, strict=True)]
        # With entries that go the other way it is no multiple.
        multiple = np.array([each.residual <= MULTIPLE_LEAVES for each in fits])
        limit = np.where(multiple, MULTIPLE_OFF, ENTRIES_TURNED / math.sqrt(step))
        limit = np.where(table, rounded, limit)
        yield PostStepDifference(sample.step, names, np.where(table, of_norm, of_pace), limit)


def _pace(control: Evidence) -> dict[str, float]:
    """By how much each buffer's norm grew per step from zero, at most, by name."""
    most: dict[str, float] = {}
    for sample in control.samples:
        if sample.buffers is None:
            continue
        for name, norm in zip(sample.buffers.names, sample.buffers.norm, strict=True):
            if np.isfinite(norm):
                most[name] = max(most.get(name, 0.0), float(norm) / max(sample.step, 1))
    return most


def unchanging(run: Evidence) -> frozenset[str]:
    """Names of buffers that are the same at all samples of a run that has several."""
    seen = [sample.buffers for sample in run.samples if sample.buffers is not None]
    if len(seen) < _FEWEST_SEEN:
        return frozenset()
    return frozenset(
        name
        for index, name in enumerate(seen[0].names)
        if all(unmoved(later, name, seen[0].sketch[index]) for later in seen)
    )


def unmoved(rows: BufferRows, name: str, sketch: Floats) -> bool:
    """Whether a buffer has the value that it had in another sample.

    On a GPU, sums of the same numbers differ in their last bits.
    """
    if name not in rows.names:
        return False
    now = rows.sketch[rows.names.index(name)]
    return bool(np.linalg.norm(now - sketch) <= SAME_WEIGHTS * np.linalg.norm(sketch))


def _gradient_limit(sample: TensorComparison, precision: Precision) -> Floats:
    """How much gradients may differ at a step, per parameter."""
    floor = float(GRADIENT_FLOORS[precision].at(np.array([sample.step]))[0])
    if sample.gradients is None:
        return np.full(len(sample.names), floor)
    limit = sample.gradients.limit
    return np.where(np.isfinite(limit), limit, floor)


def _difference(ours: Floats, theirs: Floats, sample: TensorComparison) -> Floats:
    """Relative difference of norms: infinite where only one is zero, or the test's is missing.

    As gradients are, all experts of a layer are compared as one after the first step.
    """
    lengths = [np.abs(ours - theirs), ours, theirs]
    if sample.step > SAME_TOKENS:
        lengths = [together(each, sample.names) for each in lengths]
    off, *sizes = lengths
    with np.errstate(divide="ignore", invalid="ignore"):
        off = off / np.minimum(*sizes)
    zero = np.stack([ours == 0, theirs == 0])
    off = np.where(zero.any(axis=0), np.inf, np.nan_to_num(off, nan=np.inf, posinf=np.inf))
    return np.where(zero.all(axis=0), 0.0, off)


def _total(norms: Floats) -> float:
    return float(np.sqrt(np.sum(np.square(norms))))
