"""C6 in the middle of a run: weights or their optimizer state were not carried on as they were.

No curve shows what a resume lost. The first sample after it does: weights are where no update can
have brought them, or rounded, or those of a few parameters part from the control while all others
follow it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from harness.judge.causes.cause import Cause
from harness.judge.causes.groups import describe
from harness.judge.curves import series
from harness.judge.floors import FIRST_STEPS
from harness.judge.scene import Scene, words_of
from harness.judge.sketches import fit, update
from harness.judge.tensors import TensorComparison
from harness.model import CauseClass, Floats, Integers, Precision, TensorSample

ADAM_REACH = 1.25
"""Learning rates per step that the entries of a tensor move by under Adam, in the root mean square.

The step size bounds it (Kingma and Ba, "Adam: a method for stochastic optimization", 2015, section
2.1); weight decay adds a little.
"""
BEYOND = 1.6
"""More learning rates per step than this are out of Adam's reach."""
BFLOAT16_LEAVES = (4e-4, 6e-3)
"""Relative difference of a whole tensor from itself in bfloat16: 8 bits, and what training adds."""
ALL_ALIKE = 10.0
"""Rounding spares no tensor: the furthest differs by at most this times the nearest."""
STANDS_OUT = 4.0
"""Times the furthest of all other tensors."""
ASIDE = 0.5
"""What a factor leaves of an update, at most, that goes along the control's."""
NOTABLE = 0.2
"""Share of an update; a smaller difference says nothing about single tensors."""

_NOTHING = 1e-12

_LOADED = (
    "what a resume between those steps saves and loads, by which names, and whether it is strict: "
    "weights, and the optimizer's state of each"
)
_SETTINGS = (
    "what changes between those steps for these parameters alone: learning rate, betas and weight "
    "decay of their group"
)


class _Parting(NamedTuple):
    """The first sample at which the runs are apart, after the first steps."""

    before: TensorComparison
    sample: TensorComparison
    after: TensorComparison | None
    """The next sample."""

    @property
    def between(self) -> str:
        return f"between steps {self.before.step} and {self.sample.step}"


def moved_too_far(scene: Scene) -> Cause | None:
    """Weights moved once by more than the learning rate lets an optimizer move them."""
    parting = _parting(scene)
    if parting is None or parting.after is None:
        return None
    before, sample, after = parting.before, parting.sample, parting.after
    control = _reach(before.control, sample.control, scene)
    ours = _reach(before.test, sample.test, scene)
    later = _reach(sample.test, after.test, scene)
    if not control.max(initial=0.0) <= ADAM_REACH:
        return None
    far = np.flatnonzero(ours > BEYOND)
    # A rate that stays too high moves everything too far for as long as it does.
    if not far.size or np.median(later[far]) > BEYOND:
        return None
    names = [sample.names[index] for index in far[np.argsort(-ours[far], kind="stable")]]
    sentence = (
        f"state is lost {parting.between}: {describe(names, sample.names)} move up to "
        f"{ours.max():.3g} learning rates a step, where the control moves at most "
        f"{control.max():.2g} and Adam hardly more than one, and not so later: weights were "
        f"replaced, or the optimizer lost its second moments{_seen(scene)}"
    )
    return Cause(sentence, CauseClass.STATE, _LOADED)


def rounded(scene: Scene) -> Cause | None:
    """All weights differ by what bfloat16 rounds away of them, and did not before."""
    parting = _parting(scene)
    if parting is None or scene.precision is not Precision.FP32:
        return None
    _, sample, _ = parting
    ours, theirs = sample.test.parameters, sample.control.parameters
    known = theirs.norm > 0
    apart = np.linalg.norm(ours.sketch - theirs.sketch, axis=1)[known] / theirs.norm[known]
    least, most = BFLOAT16_LEAVES
    if not apart.size or not least <= apart.min() <= apart.max() <= most:
        return None
    if apart.max() > ALL_ALIKE * apart.min():
        return None
    sentence = (
        f"weights are rounded {parting.between}: each of {apart.size} parameters differs from the "
        f"control's by {apart.min():.1g} to {apart.max():.1g} of itself, as bfloat16 leaves it"
        f"{_seen(scene)}"
    )
    look_at = (
        "what stores or exports weights in lower precision and is loaded again "
        "(checkpoint.export_dtype, last_save_model_only)"
    )
    return Cause(sentence, CauseClass.STATE, look_at)


def some_parted(scene: Scene) -> Cause | None:
    """A few parameters part from the control, and not by their gradients."""
    parting = _parting(scene)
    if parting is None or _gradients_first(scene):
        return None
    sample = parting.sample
    few, rest = _standing_out(sample)
    if not few.size or not _outside(sample, few) or _by_gradient(sample, few):
        return None
    one = few.size == 1
    head = f"{describe([sample.names[index] for index in few], sample.names)} part{'s' * one}"
    head += (
        f" from the control by {_differences(sample)[few].max():.2g} of the update, and not by "
        f"{'its gradient' if one else 'their gradients'}, while the furthest of all others is off "
        f"by {rest:.2g}"
    )
    factors = _factors(parting, few)
    if factors is not None:
        least, most = f"{min(factors):.3g}", f"{max(factors):.3g}"
        by = least if least == most else f"{least} to {most}"
        sentence = f"updates begin to differ {parting.between}: {head}; moved {by} times as far"
        return Cause(f"{sentence}{_seen(scene)}", CauseClass.UPDATE, _SETTINGS)
    if parting.after is None:  # it may have happened once, or go on
        sentence = f"the runs part {parting.between}: {head}{_seen(scene)}"
        return Cause(sentence, CauseClass.LATER, f"{_LOADED}; {_SETTINGS}")
    if _gap(parting.after, few) > _gap(sample, few) / 2:
        sentence = f"updates begin to differ {parting.between}: {head}, and as much later"
        return Cause(f"{sentence}{_seen(scene)}", CauseClass.UPDATE, _SETTINGS)
    sentence = (
        f"state is lost {parting.between}: {head}: the weights or the optimizer state of "
        f"{'it' if one else 'these'} alone were lost or exchanged{_seen(scene)}"
    )
    return Cause(sentence, CauseClass.STATE, _LOADED)


def _gradients_first(scene: Scene) -> bool:
    """Whether the first thing to be off is the gradient norm, under a right loss."""
    norm, first = scene.curve("grad_norm"), scene.first_failure()
    if norm is None:
        return True  # nobody knows
    return first is not None and norm.onset == first and bool(scene.agrees("loss", first))


def _parting(scene: Scene) -> _Parting | None:
    samples = scene.case.tensors
    for number, (before, sample) in enumerate(pairwise(samples), start=1):
        if sample.updates is not None and sample.updates.outside.size:
            after = samples[number + 1] if number + 1 < len(samples) else None
            return _Parting(before, sample, after) if sample.step > FIRST_STEPS else None
        if sample.gradients is not None and sample.gradients.outside.size:
            return None
    return None


def _reach(before: TensorSample, sample: TensorSample, scene: Scene) -> Floats:
    """Shape (parameters,): what the entries moved by, in learning rates of the control per step."""
    moved = np.linalg.norm(update(before, sample), axis=1) / np.sqrt(np.maximum(sample.sizes, 1))
    schedule = series(scene.case.control, "lr")
    steps = (schedule.steps > before.step) & (schedule.steps <= sample.step)
    rates = float(np.sum(schedule.values[steps]))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(moved / rates, dtype=np.float64)


def _differences(sample: TensorComparison) -> Floats:
    """Shape (parameters,): of updates; 0 where nothing can be told of one.

    That is where they were not compared, where storing the weights may round off all of an update,
    and where the control's did: a ratio to nothing is no measure.
    """
    found = sample.updates
    if found is None:
        return np.zeros(len(sample.names))
    known = np.isfinite(found.difference) & np.isfinite(found.limit)
    return np.where(known, found.difference, 0.0)


def _standing_out(sample: TensorComparison) -> tuple[Integers, float]:
    """The few parameters that are far off, furthest first, and how far the next one is."""
    difference = _differences(sample)
    order = np.argsort(-difference, kind="stable")
    falling = np.maximum(difference[order], _NOTHING)
    half = falling.size // 2
    with np.errstate(invalid="ignore"):  # of two that are infinitely far off neither stands out
        gaps = np.nan_to_num(falling[:half] / falling[1 : half + 1], nan=1.0, posinf=np.inf)
    if not half or not gaps.max() >= STANDS_OUT:
        return order[:0], 0.0
    count = int(np.argmax(gaps)) + 1
    few = order[:count] if falling[count - 1] >= NOTABLE else order[:0]
    return few, float(falling[count])


def _outside(sample: TensorComparison, few: Integers) -> bool:
    """Whether any of these is outside its limit: in low precision others may be, that are not."""
    return sample.updates is not None and bool(np.isin(few, sample.updates.outside).any())


def _by_gradient(sample: TensorComparison, few: Integers) -> bool:
    """Whether the gradients of these parameters stand out, too."""
    if sample.gradients is None:
        return True
    others = np.delete(sample.gradients.difference, few)
    return bool(sample.gradients.difference[few].max() > 2 * others.max(initial=0.0))


def _factors(parting: _Parting, few: Integers) -> list[float] | None:
    """By which factors these move along the control's updates; None if they move elsewhere."""
    before, sample = parting.before, parting.sample
    ours, theirs = update(before.test, sample.test), update(before.control, sample.control)
    fits = [fit(ours[index], theirs[index]) for index in few]
    along = all(each.residual < min(ASIDE, abs(1 - each.factor)) for each in fits)
    return [each.factor for each in fits] if along else None


def _gap(sample: TensorComparison, few: Integers) -> float:
    """How many times further off the nearest of these is than the furthest of the others."""
    difference = np.maximum(_differences(sample), _NOTHING)
    return float(difference[few].min() / np.delete(difference, few).max())


def _seen(scene: Scene) -> str:
    """What the curves show of it, and when."""
    off = scene.off()
    return f"; {words_of(off[0])} leaves the control at step {off[0].onset}" if off else ""
