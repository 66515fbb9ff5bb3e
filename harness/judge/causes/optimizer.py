"""C6 from what the optimizer keeps: its counters, its moments, and the gradients it was given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from harness.judge.causes.cause import Cause
from harness.judge.causes.groups import describe, joined
from harness.judge.scene import Scene, loss_agrees
from harness.judge.tensors import TensorComparison
from harness.model import CauseClass, Flags, Floats, Outcome, UpdateRows

SAME = 1e-3
"""Relative difference below which two norms of clipped gradients or of states are the same."""
COUNTED = 1e-2
"""Counters are whole numbers, averaged over the entries of a tensor: those of its shards."""
NOTABLE = 1e-2
"""Relative difference of a state's norm that rounding of right gradients does not make in fp32 …"""
SQUARED = 2.0
"""… and never more than this many times what the gradients so far differ by: a moment is an average
of them or of their squares."""

_RESUMED = (
    "what a resume between those steps saves and loads of the optimizer: its state by parameter "
    "names, not by places, and every pipeline stage's (checkpoint.exclude_from_loading)"
)
_SKIPPED = "what skips or repeats updates: a loss scaler, a guard against spikes, accumulation"


def counted_first(scene: Scene) -> Cause | None:
    """Counts part before any gradient does: they are exact, and gradients follow from updates."""
    counts = scene.checks.get("optimizer-steps")
    if counts is None or counts.outcome is not Outcome.FAIL or counts.onset is None:
        return None
    others = scene.first_failure(
        "optimizer-steps", "optimizer-state-first-steps", "optimizer-state-envelope"
    )
    return counted_otherwise(scene) if others is None or others > counts.onset else None


def counted_otherwise(scene: Scene) -> Cause | None:
    """The optimizer has counted other updates than the control's: it started over, or skipped."""
    for before, sample in pairwise(scene.case.tensors):
        ours, theirs = sample.test.left, sample.control.left
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
        # A counter that started over says when: it has counted every step since.
        since = sample.step - counts
        if np.all((since >= before.step - COUNTED) & (since < sample.step)):
            sentence = f"optimizer state is lost after step {_range(since)}: {said}"
            return Cause(f"{sentence}{_agreed(scene, sample)}", CauseClass.STATE, _RESUMED)
        if np.any(np.abs(counts - np.round(counts)) > COUNTED):
            sentence = (
                f"optimizer state is lost on some ranks between steps {before.step} and "
                f"{sample.step}: {said} in the mean over a tensor's shards"
            )
            return Cause(f"{sentence}{_agreed(scene, sample)}", CauseClass.STATE, _RESUMED)
        sentence = f"updates are skipped or repeated since step {before.step}: {said}"
        return Cause(sentence, CauseClass.UPDATE, _SKIPPED)
    return None


def averaged_otherwise(scene: Scene) -> Cause | None:
    """Right gradients at the first update, and all moments are one multiple of the control's.

    The first update shows the settings alone: Adam's moments are then ``(1 - beta1) x gradient``
    and ``(1 - beta2) x gradient^2``, and its bias correction takes both out of the update.
    """
    sample = next((each for each in scene.case.tensors if each.test.left is not None), None)
    if sample is None or sample.gradients is None or sample.gradients.outside.size:
        return None
    first = scene.first_failure()
    ratios, left = _state_ratios(sample), (sample.test.left, sample.control.left)
    if ratios is None or left[0] is None or left[1] is None or sample.step != 1:
        return None
    if (first is not None and first < sample.step) or scene.failed("same-initial-parameters"):
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
        apart = _ALIKE * abs(middle - 1)
        alike = np.abs(of_state - middle).max() <= apart and np.abs(given[known]).max() <= apart
        if alike and abs(middle - 1) > SAME:
            share = _SHARE.get(state)
            named = f", so 1 - {share} is {middle:.4g} times what it is there" if share else ""
            found.append(f"{state} is {middle:.4g} times the control's{named}")
    if not found:
        return None
    sentence = (
        f"the optimizer averages gradients otherwise: at step {sample.step} gradients agree, and "
        f"of all {np.count_nonzero(known)} parameters alike {joined(found)}"
        f"{loss_agrees(scene, sample.step)}"
    )
    return Cause(sentence, CauseClass.UPDATE, _AVERAGES)


_ALIKE = 0.1
"""Share of what a ratio differs from one by: parameters whose ratios are within it have one."""
_SHARE = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}
_AVERAGES = (
    "the optimizer's betas or momentum, by parameter group, and what multiplies gradients between "
    "clipping and the optimizer"
)


def moments_lost(scene: Scene) -> Cause | None:
    """Gradients agree, and what the optimizer keeps of the earlier ones does not any more."""
    explained = NOTABLE
    for before, sample in pairwise(scene.case.tensors):
        if sample.gradients is None or sample.gradients.outside.size:
            return None
        explained = max(explained, SQUARED * float(sample.gradients.difference.max()))
        ratios = _state_ratios(sample)
        if ratios is None or sample.test.left is None:
            continue
        off = _far(ratios, explained)
        if not off.any():
            continue
        earlier = _state_ratios(before)
        norms = _clipped(sample)
        if earlier is None or _far(earlier, explained).any():
            return None
        if norms is not None and abs(norms[1] / norms[2] - 1) > SAME:
            return None  # other gradients were given to it
        parts = []
        for column in np.flatnonzero(off.any(axis=0)):
            rows = np.flatnonzero(off[:, column])
            names = describe([sample.names[index] for index in rows], sample.names)
            factors = ratios[rows, column]
            parts.append(
                f"{sample.test.left.states[column]} of {names} is {factors.min():.2g} to "
                f"{factors.max():.2g} times as long as the control's"
            )
        sentence = (
            f"optimizer state is lost between steps {before.step} and {sample.step}: gradients "
            f"agree and {joined(parts)}{loss_agrees(scene, sample.step)}"
        )
        return Cause(sentence, CauseClass.STATE, _RESUMED)
    return None


def _clipped(sample: TensorComparison) -> tuple[float, float, float] | None:
    """The test set's whole norm before and after clipping, and the control's after it.

    None where the control was not clipped, or it is not known.
    """
    ours, theirs = sample.test, sample.control
    if ours.gradients is None or theirs.gradients is None:
        return None
    if ours.left is None or theirs.left is None:
        return None
    given, reference = _whole(ours.gradients.norm), _whole(theirs.gradients.norm)
    left, clipped = _whole(ours.left.clipped_norm), _whole(theirs.left.clipped_norm)
    known = all(np.isfinite(norm) and norm > 0 for norm in (given, reference, left, clipped))
    if not known or clipped >= reference * (1 - SAME):
        return None
    return given, left, clipped


def _whole(norms: Floats) -> float:
    return float(np.linalg.norm(norms))


def _state_ratios(sample: TensorComparison) -> Floats | None:
    """Shape (parameters, states): the test set's norms over the control's."""
    ours, theirs = sample.test.left, sample.control.left
    if ours is None or theirs is None or not _comparable(ours, theirs):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = ours.state_norm / theirs.state_norm
    return np.where(np.isnan(ratio), 1.0, ratio)


def _comparable(ours: UpdateRows, theirs: UpdateRows) -> bool:
    return ours.states == theirs.states and len(ours.states) > 0


def _far(ratios: Floats, explained: float) -> Flags:
    return np.asarray(np.abs(ratios - 1) > explained, dtype=np.bool_)


def _range(numbers: Floats) -> str:
    least, most = f"{np.min(numbers):.4g}", f"{np.max(numbers):.4g}"
    return least if least == most else f"{least} to {most}"


def _agreed(scene: Scene, sample: TensorComparison) -> str:
    """From when on the curves show it."""
    off = [curve for curve in scene.off() if (curve.onset or 0) <= sample.step]
    return f"; the curves part at step {off[0].onset}" if off else loss_agrees(scene, sample.step)
