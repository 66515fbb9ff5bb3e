"""What curves show after the first steps: glitches, lost state, rounding that grows.

Two curves alone show when and how they begin to differ, and nothing about gradients.
"""

from __future__ import annotations

import math

import numpy as np

from converge_harness.judge.causes.context import (
    ABRUPT,
    Context,
    begins,
    is_constant,
    loss_agrees,
    ratio_text,
    signal_name,
)
from converge_harness.judge.causes.resume import of_pass
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.causes.updates import first_part
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.tensors import TensorComparison, TensorDifferences
from converge_harness.model import CauseClass, Floats, Outcome, Precision, Tier
from converge_harness.wording import distinct_digits

_ONE_OFF = (
    "what happens at that step alone: its samples, gradients that were not set to zero, a skipped "
    "or repeated collective, a spike that clipping swallows"
)
_REDUCED = (
    "reductions that a flag, a hook or a schedule leaves out (no_sync, the last microbatch), "
    "masks and RNG of the backward pass, and what is scheduled for that step"
)
_STATE = (
    "state that training carries along: optimizer moments, buffers, RNG, loader and scheduler "
    "state, and what is scheduled for that step"
)


@signature(
    Basis.LATER_CURVES,
    Stage.RUN,
    # A step that stands out is not smooth growth.
    overrides=("rounding_growth",),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.CURVES),
)
def one_step(context: Context) -> Cause | None:
    """A glitch: one step is off, alone or by far more than others; training goes on from there."""
    off = context.off()
    if not off:
        return None
    step = off[0].onset or 0
    worst = max(
        (envelope for envelope in off if envelope.onset == step),
        key=lambda envelope: float(envelope.difference[envelope.index_of(step)]),
    )
    index = worst.index_of(step)
    head = f"{signal_name(worst)} is {ratio_text(worst, index)} times the control's at step {step}"
    alone = all(
        envelope.onset == step and envelope.outside.size == 1 and _stands_out(envelope)
        for envelope in off
    )
    if alone and index < worst.steps.size - 1 and not _tensors_off_after(context, step):
        sentence = f"one step alone is off: {head}, and all others agree"
    elif all(_spikes(envelope) for envelope in off if envelope.onset == step):
        then = worst.difference[index + 1 :]
        sentence = (
            f"one step is off by far: {head}{loss_agrees(context, step)}; what follows is off by "
            f"{np.median(then):.2g} in the median, as after any other update"
        )
    else:
        return None
    return Cause(sentence, CauseClass.GLITCH, _ONE_OFF)


_AFTERMATH = 3
"""Steps that must follow a spike."""


def _stands_out(curve: Envelope) -> bool:
    """Whether a step is off by more than most others, though inside a limit that grows later."""
    others = np.delete(curve.difference, curve.index_of(curve.onset or 0))
    peak = float(curve.difference[curve.index_of(curve.onset or 0)])
    return not others.size or bool(ABRUPT * np.median(others) <= peak)


def _spikes(curve: Envelope) -> bool:
    """Whether a curve is first off at a step, and by much less after it."""
    index = curve.index_of(curve.onset or 0)
    then, peak = curve.difference[index + 1 :], float(curve.difference[index])
    if not index or then.size < _AFTERMATH or not begins(curve, index) or curve.outside.size == 1:
        return False
    return bool(then.max() <= peak / 2 and ABRUPT * np.median(then) <= peak)


@signature(Basis.LATER_STATE, Stage.RESUME)
def lost_at_resume(context: Context) -> Cause | None:
    """C6: a restart replayed steps with other values, or the runs differ right after one."""
    test = context.compared.test
    if test.passes or not (test.replayed or test.replay_conflicts):
        return None  # passes tell exactly what a resume lost (causes/resume.py)
    look_at = (
        "what the checkpoint holds and what is loaded: optimizer, lr scheduler, loader, RNG and "
        "buffers (checkpoint.exclude_from_loading, load_only)"
    )
    onset = context.first_failure()
    where = first_part(context)
    if test.replay_conflicts:
        first, more = test.replay_conflicts[0], len(test.replay_conflicts) - 1
        others = f" (and {more} more)" if more else ""
        if test.replayed and onset is not None and onset < min(test.replayed):
            return None
        sentence = f"state is lost at a restart: replayed steps differ, {first}{others}{where}"
        return Cause(sentence, CauseClass.STATE, look_at)
    begin, end = min(test.replayed), max(test.replayed)
    if onset is None or not begin <= onset <= end + 1:
        return None
    sentence = (
        f"state is lost at a restart: the run replayed steps {begin} to {end} and leaves its "
        f"control at step {onset}{where}"
    )
    return Cause(sentence, CauseClass.STATE, look_at)


@signature(Basis.LATER_CURVES, Stage.BACKWARD)
def gradients_from(context: Context) -> Cause | None:
    """C1, C2, beginning later: the grad norm jumps at a step whose loss is correct."""
    norm = context.curve("grad_norm")
    onset = context.first_failure()
    if norm is None or norm.onset is None or onset is None or norm.onset > onset:
        return None
    index, step = norm.index_of(norm.onset), norm.onset
    if not index or not context.agrees("loss", step) or not begins(norm, index):
        return None
    ratio, _ = context.ratio(norm)
    named = context.named(norm, index)
    head = f"from step {step} on"
    tail = f"{loss_agrees(context, step)}, and all before agrees{first_part(context)}"
    if (named.text and ratio.size - index > 1) or is_constant(ratio[index:]):
        known = f", which equals {named.text}" if named.text else ""
        sentence = (
            f"{head} gradients are scaled by {ratio_text(norm, index)}{known}: {signal_name(norm)} "
            f"{norm.test[index]:.4g} (control: {norm.control[index]:.4g}){tail}"
        )
        look_at = "what begins to divide or multiply gradients then; " + (named.where or _STATE)
        return Cause(sentence, CauseClass.GRADIENT_SCALE, look_at)
    sentence = (
        f"{head} the backward pass differs: {signal_name(norm)} is off by "
        f"{norm.difference[index]:.2g}, by no single factor{tail}"
    )
    return Cause(
        sentence, CauseClass.GRADIENT_DIRECTION, f"what changes at step {step}: {_REDUCED}"
    )


@signature(Basis.LATER_CURVES, Stage.RUN, asked_of=(ComparisonKind.ORDINARY, ComparisonKind.CURVES))
def rounding_growth(context: Context) -> Cause | None:
    """Benign kernel drift: from rounding, smoothly, and all tensors alike."""
    if any(
        check.outcome is Outcome.FAIL and check.tier in (Tier.INTEGRITY, Tier.FIRST_STEP)
        for check in context.checks.values()
    ):
        return None
    off = context.off()
    curve = (
        context.curve("loss") if off and context.curve("loss") in off else off[0] if off else None
    )
    if curve is None or not all(_smooth(each) for each in off) or not _alike(context):
        return None
    rate = _rate(curve)
    if rate is None:
        return None
    known = np.flatnonzero(curve.difference > 0)
    first, last = int(known[0]), curve.steps.size - 1
    tensors = " and no tensor" if context.compared.tensors else ""
    sentence = (
        f"rounding grows: {signal_name(curve)} differs by {curve.difference[first]:.1g} at step "
        f"{curve.steps[first]}, inside the limit of rounding, and then smoothly, doubling "
        f"every {math.log(2) / rate:.2g} steps, to {curve.difference[last]:.1g} at step "
        f"{curve.steps[last]}; no step{tensors} stands out: probably benign drift of "
        "different kernels, which a longer calibration or the equivalence tier decides"
    )
    return Cause(
        sentence,
        CauseClass.ROUNDING_GROWTH,
        "kernels and the order of their sums (attention backend, compile, matmul precision); "
        "calibrate over as many steps, and see the check loss-equivalent",
    )


_FEWEST_POINTS = 6
_MOST_SCATTER = 1.0
"""Standard deviation of a smooth curve's logarithm about the fit: differences cross zero."""
_LEAST_GROWTH = math.log(10.0)
"""Least growth of the fit over the run; less is no growth."""
_SAME_LAW = math.log(8.0)
"""How much faster than the learnt limits the difference may grow over the run, as a logarithm."""
_STANDS_OUT = 20.0
"""Multiple of the median tensor's excess over its limit."""


def _smooth(curve: Envelope) -> bool:
    """From inside the limit at the first step, without a jump, and as rounding grows."""
    so_far = np.maximum.accumulate(curve.difference)
    quiet = np.maximum(so_far[:-1], curve.limit[0])
    with np.errstate(over="ignore"):  # a number that overflows is infinite
        jumps = ~(curve.difference[1:] <= ABRUPT * quiet)
    starts_inside = bool(curve.difference[0] <= curve.limit[0])
    return starts_inside and not jumps.any() and _rate(curve) is not None


def _rate(curve: Envelope) -> float | None:
    """Growth per step; None where there is none, or it is not that of rounding.

    Rounding grows as the repeats' differences do, where limits are learnt from repeats: then the
    difference is about the same multiple of the limits throughout. Without repeats the growth has
    to be exponential, as in a chaotic system.
    """
    known = (curve.difference > 0) & np.isfinite(curve.difference) & (curve.limit > 0)
    if np.count_nonzero(known) < _FEWEST_POINTS:
        return None
    steps, logarithm = curve.steps[known].astype(np.float64), np.log(curve.difference[known])
    rate, scatter = _line(steps, logarithm)
    grown = rate * float(steps[-1] - steps[0])
    if scatter > _MOST_SCATTER or grown < max(_LEAST_GROWTH, 2 * scatter):
        return None
    learnt = curve.learnt[known]
    if np.count_nonzero(learnt) >= _FEWEST_POINTS:
        limit = np.log(curve.limit[known][learnt])
        tilt, off = _line(steps[learnt], logarithm[learnt] - limit)
        away = abs(tilt) * float(steps[learnt][-1] - steps[learnt][0])
        lawful = away < _SAME_LAW and off < _MOST_SCATTER
    else:
        lawful = scatter < _line(np.log1p(steps - curve.steps[0]), logarithm)[1]
    return rate if lawful else None


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope of a least-squares line, and the standard deviation about it."""
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(np.std(y - (slope * x + start)))


def _alike(context: Context) -> bool:
    """No tensor of any sample is much further outside its limit than the others."""
    return all(
        _together(found)
        for sample in context.compared.tensors
        for found in _kinds(sample)
        if found.outside.size
    )


def _together(found: TensorDifferences) -> bool:
    with np.errstate(divide="ignore", invalid="ignore"):
        excess: Floats = found.difference / found.limit
    if not np.all(np.isfinite(excess)):
        return False
    return bool(excess.max() <= _STANDS_OUT * np.median(excess))


def _kinds(sample: TensorComparison) -> list[TensorDifferences]:
    return [found for found in (sample.gradients, sample.updates) if found is not None]


def _tensors_off_after(context: Context, step: int) -> bool:
    return any(
        found.outside.size
        for sample in context.compared.tensors
        if sample.step > step
        for found in _kinds(sample)
    )


@signature(Basis.LEFT_OVER, Stage.RUN)
def later(context: Context) -> Cause | None:
    """C3, C6: the first step is correct, and the runs differ later."""
    where = first_part(context)
    off = context.off()
    if not off:
        return _only_tensors(context, where)
    first = off[0]
    onset = first.onset or 0
    index = first.index_of(onset)
    precision, look_at = context.precision, _STATE
    if precision is not Precision.FP32:
        suspects = (
            f"before that, a difference may hide below the floor of {precision.value} arithmetic; "
            "the same pair in fp32 would show its first step"
        )
    elif index == 1:
        suspects = (
            "the first update differs: optimizer, replicas, or a gradient direction that norms hide"
        )
        look_at = "clipping and the optimizer's settings and state; gradients per parameter"
    else:
        suspects = (
            "perhaps state that is kept from step to step (optimizer, buffers, replicas, "
            "schedule, data)"
        )
    how = "suddenly " if index and begins(first, index) else ""
    sentence = (
        f"the runs agree until step {onset}, where {signal_name(first)} is {how}off by "
        f"{first.difference[index]:.2g}: {suspects}{where}"
    )
    return Cause(sentence, CauseClass.LATER, look_at)


def _only_tensors(context: Context, where: str) -> Cause | None:
    """Only tensors show a difference, the curves not yet."""
    if not where or not context.failed("gradients-envelope", "updates-envelope"):
        return None
    sentence = f"the curves agree throughout, and tensors do not{where}"
    return Cause(sentence, CauseClass.LATER, _STATE)


_A_FACTOR = 0.5
"""A difference from which on it is said as a factor, since "relative 3" may be 4 times or 1/4."""
_LOOK_AT = (
    "whether both runs had the same initial weights, samples, batch size and learning rate, which "
    "curves do not tell; then give both the probe (docs/probe.md), which names what differs"
)
_SAME_IN_CURVES = (
    "two curves do not show the cause: a difference of initial weights, samples, learning rate, "
    "objective or gradients looks the same in them"
)


@signature(Basis.LATER_STATE, Stage.RESUME, asked_of=(ComparisonKind.CURVES,))
def logged_twice(context: Context) -> Cause | None:
    """Steps that occur twice in a log, with different values."""
    conflicts = context.compared.test.replay_conflicts
    if not conflicts:
        return None
    others = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
    return Cause(
        f"steps were logged twice with different values, {conflicts[0]}{others}: by a restart "
        "that lost state, or by two runs into one log, which look the same in curves",
        _KIND,
        "whether the run was restarted there, and then what its checkpoint holds and loads",
    )


@signature(Basis.LEFT_OVER, Stage.RUN, asked_of=(ComparisonKind.CURVES,))
def curves_part(context: Context) -> Cause | None:
    """Where two curves begin to differ, for good or not; causes look alike in a curve."""
    failed = [check for check in context.checks.values() if check.outcome is Outcome.FAIL]
    curves = [each for each in context.off() if _failed(context, each)]
    if not failed:
        return None
    if not curves:
        return Cause(f"the curves differ: {failed[0].detail}; {_SAME_IN_CURVES}", _KIND, _LOOK_AT)
    curve = curves[0]
    onset = context.first_failure()
    index = curve.index_of(onset if onset is not None else curve.onset or 0)
    index = min(index, curve.steps.size - 1)
    step, off = int(curve.steps[index]), float(curve.difference[index])
    if index and curve.onset == step:
        how = "suddenly " if begins(curve, index) else ""
        head = (
            f"the curves agree until step {step}, where {signal_name(curve)} is {how}off by "
            f"{off:.2g}"
        )
    else:
        test, control = distinct_digits(float(curve.test[index]), float(curve.control[index]))
        far = f"relative {off:.2g}"
        if off >= _A_FACTOR and min(curve.test[index], curve.control[index]) > 0:
            far = f"{ratio_text(curve, index)} times as much"
        beside = loss_agrees(context, step) if curve.signal != "loss" else ""
        head = (
            f"the curves differ: {signal_name(curve)} {test} (control: {control}) at step {step} "
            f"({far}){beside}"
        )
    head += of_pass(context, step)
    lasting = onset is None and context.detail(f"{_slug(curve)}-envelope")
    return Cause(f"{head}; {lasting + '; ' if lasting else ''}{_SAME_IN_CURVES}", _KIND, _LOOK_AT)


_KIND = CauseClass.UNKNOWN


def _slug(curve: Envelope) -> str:
    return curve.signal.replace("_", "-")


def _failed(context: Context, curve: Envelope) -> bool:
    return context.failed(f"{_slug(curve)}-first-step", f"{_slug(curve)}-envelope")
