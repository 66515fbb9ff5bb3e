"""Between gradient and weight: clipping, and the optimizer's counters and state.

Wrong clipping shows between correct gradients and wrong updates; in the loss AdamW hides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import Context, loss_agrees
from converge_harness.judge.causes.location import stage_clause
from converge_harness.judge.causes.parameter_names import describe, joined
from converge_harness.judge.causes.signature import Basis, Cause, Stage, signature
from converge_harness.judge.compare.post_step_state import UNCLIPPED, Clipping, clippings
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.model import CauseClass, Flags, Floats, Outcome, PostStepState

_CHECKS = ("clipping-first-steps", "clipping-envelope")
_MISREPORTED = "reported-grad-norm-is-recomputed"
_METRIC_CHECKS = (
    "grad-norm-first-step",
    "grad-norm-envelope",
    _MISREPORTED,
    "reported-loss-is-recomputed",
)
_BEYOND = 2.0
"""A factor that is wrong by more than this many times the gradients' difference does not follow
from them; a gradient that differs between ranks, say, has another norm on each."""
_MOST_GROUPS = 4
_OWN = 1e-2
"""How near a group's factor must be to the one of its own norm, to be clipped by it."""
_LOOK_AT = (
    "where gradients are clipped: max_norm, whether it is called in every step, and the norm that "
    "it uses: over all parameters, all pipeline stages and all mesh dimensions"
)

_CHANGED_AFTER = (
    "what touches gradients after clipping: the optimizer's own (weight decay added to gradients, "
    "maximize), its hooks, a communication that comes late"
)


class _Group(NamedTuple):
    """Parameters that were clipped by the same factor."""

    members: list[int]
    factor: float


@signature(Basis.EXACT, Stage.CLIPPING)
def clipping(context: Context) -> Cause | None:
    """Gradients are multiplied by another factor than their norm requires."""
    if not context.failed(*_CHECKS):
        return None
    found = list(
        clippings(context.compared.tensors, context.compared.test, context.compared.control)
    )
    index = next((place for place, each in enumerate(found) if each.wrong), None)
    if index is None:
        return None
    wrong, before = found[index], found[index - 1].step if index else None
    first = context.first_failure(*_CHECKS, *_METRIC_CHECKS)
    if first is not None and first <= (before or 0):
        return None
    sample = context.sample(wrong.step)
    if sample is None or not _by_itself(wrong, sample):
        return None
    when = (
        f"at step {wrong.step}"
        if before is None
        else f"after step {before}, where they still were, and at step {wrong.step}"
    )
    groups = _groups(wrong)
    if wrong.odd and len(groups) > _MOST_GROUPS and wrong.factors.max() > 1 + wrong.deviation_limit:
        odd = [wrong.names[index] for index in wrong.odd]
        sentence = (
            f"gradients agree, and are changed between clipping and the update {when}: clipping "
            f"multiplies all by one factor ({wrong.expected:.4g} here) and increases no norm, and "
            f"their norms are now {wrong.factors.min():.4g} to {wrong.factors.max():.4g} of what "
            f"they were; {describe(odd, sample.names)} differ from most"
            f"{loss_agrees(context, wrong.step)}"
        )
        return Cause(sentence, CauseClass.UPDATE, _CHANGED_AFTER)
    sentence = (
        f"gradients are not clipped as they should be {when}: "
        f"{_said(wrong, groups, sample, context)}{loss_agrees(context, wrong.step)}"
        f"{_norm_too(context)}"
    )
    return Cause(sentence, CauseClass.CLIPPING, _LOOK_AT)


def _by_itself(wrong: Clipping, sample: TensorComparison) -> bool:
    """Whether clipping is wrong by more than gradients that differ explain."""
    if sample.gradients is None or not sample.gradients.outside.size:
        return True
    ours, theirs = sample.test.gradients, sample.control.gradients
    if ours is None or theirs is None:
        return True
    parts = np.linalg.norm(ours.sketch - theirs.sketch, axis=-1)
    explained = float(np.linalg.norm(parts) / np.linalg.norm(ours.norm))
    return max(float(wrong.deviation.max()), wrong.off) > _BEYOND * explained


def _said(
    wrong: Clipping, groups: Sequence[_Group], sample: TensorComparison, context: Context
) -> str:
    asked = f"their norm asks for {wrong.expected:.4g}"
    if wrong.odd and len(groups) > _MOST_GROUPS:
        return _each_otherwise(wrong, asked)
    if wrong.odd:
        parts = []
        for group in groups:
            names = [wrong.names[index] for index in group.members]
            stage = stage_clause(names, sample.names, context)
            parts.append(f"{describe(names, sample.names)}{stage} by {group.factor:.4g}")
        own = ""
        if all(_own_norm(wrong, group) for group in groups):
            own = "; each group is clipped by the norm of its own gradients alone"
        return f"multiplied are {joined(parts)}, where {asked}{own}"
    norm = float(np.linalg.norm(wrong.norms))
    if abs(wrong.common - 1) <= UNCLIPPED:
        return f"they are not clipped at all, where {asked} (a norm of {norm:.4g})"
    meant = f" where {wrong.most:.4g} is meant" if wrong.most is not None else ""
    return (
        f"all are multiplied by {wrong.common:.4g}, where {asked}: a norm of {norm:.4g} is clipped "
        f"to {norm * wrong.common:.4g}{meant}"
    )


def _each_otherwise(wrong: Clipping, asked: str) -> str:
    """Nearly every parameter has a factor of its own, and no norm increases."""
    least, most = float(wrong.factors.min()), float(wrong.factors.max())
    said = f"each is multiplied by another factor, from {least:.4g} to {most:.4g}, where {asked}"
    if all(_own_norm(wrong, _Group([i], float(wrong.factors[i]))) for i in range(wrong.norms.size)):
        return f"{said}; each is clipped by the norm of its own gradient alone"
    if least >= wrong.expected * (1 - wrong.common_limit):
        return (
            f"{said}, and none by a smaller one: by norms of parts, such as the shards of one rank"
        )
    return said


def _groups(wrong: Clipping) -> list[_Group]:
    """Parameters by their factors, the largest group first."""
    groups: list[list[int]] = []
    for index in np.argsort(wrong.factors, kind="stable"):
        last = wrong.factors[groups[-1][0]] if groups else np.nan
        if wrong.factors[index] - last <= 2 * wrong.deviation_limit * last:
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
    return [
        _Group(group, float(np.median(wrong.factors[group])))
        for group in sorted(groups, key=len, reverse=True)
    ]


def _own_norm(wrong: Clipping, group: _Group) -> bool:
    norm = float(np.linalg.norm(wrong.norms[group.members]))
    if wrong.most is None or not norm:
        return False
    return abs(group.factor / min(1.0, wrong.most / norm) - 1) <= _OWN


def _norm_too(context: Context) -> str:
    wrong = context.failed(_MISREPORTED) if _MISREPORTED in context.checks else False
    return "; the grad norm that is reported is wrong, too: clipping uses it" if wrong else ""


SAME = 1e-3
"""Relative difference below which two norms of clipped gradients or of states are the same."""
COUNTED = 1e-2
"""Counters are whole numbers, averaged over the entries of a tensor: those of its shards."""
NOTABLE = 1e-2
"""Relative difference of a state's norm that rounding alone does not make in fp32 …"""
SQUARED = 2.0
"""… and never more than this many times the difference of the gradients so far: a moment is an
average of them or of their squares."""

_RESUMED = (
    "what a resume between those steps saves and loads of the optimizer: its state by parameter "
    "names, not by places, and every pipeline stage's (checkpoint.exclude_from_loading)"
)
_SKIPPED = "what skips or repeats updates: a loss scaler, a guard against spikes, accumulation"


@signature(
    Basis.EXACT,
    Stage.OPTIMIZER,
    # Counts are exact, and gradients and their norms follow from updates.
    overrides=(
        "other_tables",
        "clipping",
    ),
)
def counted_first(context: Context) -> Cause | None:
    """Counts differ before any gradient: they are exact, and gradients follow from updates."""
    counts = context.checks.get("optimizer-steps")
    if counts is None or counts.outcome is not Outcome.FAIL or counts.onset is None:
        return None
    others = context.first_failure(
        "optimizer-steps", "optimizer-state-first-steps", "optimizer-state-envelope"
    )
    return counted_otherwise(context) if others is None or others > counts.onset else None


@signature(
    Basis.LATER_STATE,
    Stage.OPTIMIZER,
    # Counters are exact, moments are not.
    overrides=("moments_lost",),
)
def counted_otherwise(context: Context) -> Cause | None:
    """The optimizer counts other updates than the control's: it started over, or skipped some."""
    for before, sample in pairwise(context.compared.tensors):
        ours, theirs = sample.test.post_step, sample.control.post_step
        if ours is None or theirs is None:
            continue
        off = np.flatnonzero(np.abs(ours.state_steps - theirs.state_steps) > COUNTED)
        if not off.size:
            continue
        counts = ours.state_steps[off]
        names = describe([sample.names[index] for index in off], sample.names)
        said = (
            f"at step {sample.step} the optimizer has counted {_range(counts)} updates of {names}, "
            f"the control's {_range(theirs.state_steps[off])}"
        )
        # A counter that started over shows when: it has counted every step since.
        since = sample.step - counts
        if np.all((since >= before.step - COUNTED) & (since < sample.step)):
            sentence = f"optimizer state is lost after step {_range(since)}: {said}"
            return Cause(f"{sentence}{_agreed(context, sample)}", CauseClass.STATE, _RESUMED)
        if np.any(np.abs(counts - np.round(counts)) > COUNTED):
            sentence = (
                f"optimizer state is lost on some ranks between steps {before.step} and "
                f"{sample.step}: {said} in the mean over a tensor's shards"
            )
            return Cause(f"{sentence}{_agreed(context, sample)}", CauseClass.STATE, _RESUMED)
        sentence = f"updates are skipped or repeated since step {before.step}: {said}"
        return Cause(sentence, CauseClass.UPDATE, _SKIPPED)
    return None


@signature(Basis.FIRST_TENSORS, Stage.OPTIMIZER)
def averaged_otherwise(context: Context) -> Cause | None:
    """Correct gradients at the first update, and all moments are one multiple of the control's.

    The first update depends on the settings alone: Adam's moments are ``(1 - beta1) x gradient``
    and ``(1 - beta2) x gradient^2``, and its bias correction cancels both in the update.
    """
    sample = next(
        (each for each in context.compared.tensors if each.test.post_step is not None), None
    )
    if sample is None or sample.gradients is None or sample.gradients.outside.size:
        return None
    first = context.first_failure()
    ratios, left = _state_ratios(sample), (sample.test.post_step, sample.control.post_step)
    if ratios is None or left[0] is None or left[1] is None or sample.step != 1:
        return None
    if (first is not None and first < sample.step) or context.failed("same-initial-parameters"):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        given = left[0].clipped_norm / left[1].clipped_norm - 1
    known = np.isfinite(given) & np.all(ratios > 0, axis=1)
    if not known.any():
        return None
    found = []
    for column, state in enumerate(left[0].states):
        of_state = ratios[known, column]
        middle = float(np.median(of_state))
        near = _ALIKE * abs(middle - 1)
        alike = np.abs(of_state - middle).max() <= near and np.abs(given[known]).max() <= near
        if alike and abs(middle - 1) > SAME:
            share = _SHARE.get(state)
            named = f", so 1 - {share} is {middle:.4g} times the control's" if share else ""
            found.append(f"{state} is {middle:.4g} times the control's{named}")
    if not found:
        return None
    sentence = (
        f"the optimizer averages gradients differently: at step {sample.step} gradients agree, and "
        f"of all {np.count_nonzero(known)} parameters alike {joined(found)}"
        f"{loss_agrees(context, sample.step)}"
    )
    return Cause(sentence, CauseClass.UPDATE, _AVERAGES)


_ALIKE = 0.1
"""Parameters have the same ratio within this share of its difference from one."""
_SHARE = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}
_AVERAGES = (
    "the optimizer's betas or momentum, by parameter group, and what multiplies gradients between "
    "clipping and the optimizer"
)


@signature(Basis.LATER_STATE, Stage.OPTIMIZER)
def moments_lost(context: Context) -> Cause | None:
    """Gradients agree, and the optimizer's averages of the earlier ones no longer do."""
    explained = NOTABLE
    for before, sample in pairwise(context.compared.tensors):
        if sample.gradients is None or sample.gradients.outside.size:
            return None
        explained = max(explained, SQUARED * float(sample.gradients.difference.max()))
        ratios = _state_ratios(sample)
        if ratios is None or sample.test.post_step is None:
            continue
        off = _far(ratios, explained)
        if not off.any():
            continue
        earlier = _state_ratios(before)
        norms = _clipped(sample)
        if earlier is None or _far(earlier, explained).any():
            return None
        if norms is not None and abs(norms[1] / norms[2] - 1) > SAME:
            return None  # it was given other gradients
        parts = []
        for column in np.flatnonzero(off.any(axis=0)):
            rows = np.flatnonzero(off[:, column])
            names = describe([sample.names[index] for index in rows], sample.names)
            factors = ratios[rows, column]
            parts.append(
                f"{sample.test.post_step.states[column]} of {names} is {factors.min():.2g} to "
                f"{factors.max():.2g} times as long as the control's"
            )
        sentence = (
            f"optimizer state is lost between steps {before.step} and {sample.step}: gradients "
            f"agree and {joined(parts)}{loss_agrees(context, sample.step)}"
        )
        return Cause(sentence, CauseClass.STATE, _RESUMED)
    return None


def _clipped(sample: TensorComparison) -> tuple[float, float, float] | None:
    """The test set's total norm before and after clipping, and the control's after it.

    None where the control was not clipped, or that is not known.
    """
    ours, theirs = sample.test, sample.control
    if ours.gradients is None or theirs.gradients is None:
        return None
    if ours.post_step is None or theirs.post_step is None:
        return None
    given, expected = _whole(ours.gradients.norm), _whole(theirs.gradients.norm)
    left, clipped = _whole(ours.post_step.clipped_norm), _whole(theirs.post_step.clipped_norm)
    known = all(np.isfinite(norm) and norm > 0 for norm in (given, expected, left, clipped))
    if not known or clipped >= expected * (1 - SAME):
        return None
    return given, left, clipped


def _whole(norms: Floats) -> float:
    return float(np.linalg.norm(norms))


def _state_ratios(sample: TensorComparison) -> Floats | None:
    """Shape (parameters, states): the test set's norms over the control's."""
    ours, theirs = sample.test.post_step, sample.control.post_step
    if ours is None or theirs is None or not _comparable(ours, theirs):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = ours.state_norm / theirs.state_norm
    return np.where(np.isnan(ratio), 1.0, ratio)


def _comparable(ours: PostStepState, theirs: PostStepState) -> bool:
    return ours.states == theirs.states and len(ours.states) > 0


def _far(ratios: Floats, explained: float) -> Flags:
    return np.asarray(np.abs(ratios - 1) > explained, dtype=np.bool_)


def _range(numbers: Floats) -> str:
    least, most = f"{np.min(numbers):.4g}", f"{np.max(numbers):.4g}"
    return least if least == most else f"{least} to {most}"


def _agreed(context: Context, sample: TensorComparison) -> str:
    """A clause that says from when on the curves show it."""
    off = [curve for curve in context.off() if (curve.onset or 0) <= sample.step]
    return (
        f"; the curves differ from step {off[0].onset}"
        if off
        else loss_agrees(context, sample.step)
    )
