"""Checks of what computes in less than float32, against a reference in float32.

They belong to the first step: what they compare comes before any update.
"""

from __future__ import annotations

import numpy as np

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.limits import student
from converge_harness.judge.compare.precision_errors import (
    ALARMS,
    LASTING_SPREAD,
    Errors,
    PrecisionRuns,
    precision_flaw,
)
from converge_harness.judge.compare.random_numbers import (
    by_chance,
    furthest,
    mean_by_chance,
    unlike,
)
from converge_harness.judge.compare.tensors import MOST_DEVIATIONS
from converge_harness.model import Deviation, Evidence, Limit, Outcome, Precision, Tier

NAMED = 3
_ALONG = "how much of the rounding is parallel to gradients"
_NONE = "not measured from a reference in float32"


@check(Tier.INTEGRITY)
def reference_sound(
    test: Evidence,
    control: Evidence,
    measure: PrecisionRuns | None,
    errors: Errors | None,
    *,
    draws: bool,
) -> CheckResult:
    """The reference in float32 and the matched control are complete, on the same samples.

    Without them errors of low precision cannot be separated from rounding. Where a reference runs
    out of memory, `reference = false` in the experiment judges without one.
    """
    if measure is None and draws:
        return invalid(f"own_random_numbers: {_NONE}, and single steps cannot be compared")
    if measure is None:
        return _unmeasured(test, control, measure)
    flaw = precision_flaw(test, measure, draws=draws)
    if flaw:
        way_out = "" if draws else "; fix that, or set reference = false"
        return invalid(flaw.what + way_out, flaw.step)
    if errors is None:
        if not test.frozen_steps and not test.sample_steps:
            return skipped("frozen steps and per-tensor evidence are switched off")
        return invalid(f"{test.name} has other parameters than {measure.reference.name}")
    batches = f"{errors.batches} frozen steps" if errors.frozen else "the first step alone"
    measured = (
        f"measured from {measure.reference.name} in float32, over {batches}; the "
        f"yardstick is the error of {measure.matched.name}: {errors.error:.2g} (median gradient)"
    )
    if errors.drawing is not None:
        measured += ", plus what random numbers leave in the mean; single steps are not compared"
    return passed(measured)


@check(Tier.FIRST_STEP)
def gradient_errors(
    test: Evidence, control: Evidence, errors: Errors | None, measure: PrecisionRuns | None
) -> CheckResult:
    """Every parameter's gradient is as near to float32 as that of the matched control.

    At the same weights and samples correct implementations of one precision have errors of the same
    size. An error that is larger than rounding makes is a fault of the forward or backward pass.
    """
    if errors is None or measure is None:
        return _unmeasured(test, control, measure)
    excess = errors.ratio / errors.multiple
    outside = np.flatnonzero(errors.beyond)
    outside = outside[np.argsort(-np.nan_to_num(excess[outside], nan=np.inf), kind="stable")]
    worst = int(outside[0]) if outside.size else int(np.argmax(excess))
    origin = (
        f"{errors.multiple[worst]:.2g} x the error of {measure.matched.name}, at 1 false alarm in "
        f"{1 / ALARMS:,.0f} sets"
    )
    limit = Limit(float(errors.multiple[worst] * errors.matched[worst]), origin)
    return CheckResult(
        Outcome.FAIL if outside.size else Outcome.PASS,
        _errors_sentence(errors, outside, worst),
        measured=float(errors.test[worst]),
        limit=limit,
        unit="relative to float32",
        onset=1 if outside.size else None,
        deviations=tuple(
            Deviation(
                errors.names[index],
                1,
                float(errors.test[index]),
                float(errors.multiple[index] * errors.matched[index]),
            )
            for index in outside[:MOST_DEVIATIONS]
        ),
    )


@check(Tier.FIRST_STEP)
def gradient_scale(
    test: Evidence, control: Evidence, errors: Errors | None, measure: PrecisionRuns | None
) -> CheckResult:
    """Gradients have the norms of the matched control's.

    Rounding rotates a gradient and hardly changes its norm. One with another norm is scaled: by a
    degree, a count of tokens or microbatches, or an average where a sum belongs.
    """
    if errors is None:
        return _unmeasured(test, control, measure)
    over = f"over {_batches(errors)}"
    mean, varying = errors.scales_of_all
    measured, limit = mean if not mean[0] <= mean[1] else varying
    of_all, scaled = errors.all_scaled, errors.scaled
    if of_all:
        factor = np.expm1(errors.scale_of_rounded.mean())
        text = f"all gradients are scaled, by {factor:+.2g} on average"
    elif scaled.size:
        worst = ", ".join(
            f"{errors.names[index]} by {np.expm1(errors.scales[index]):+.2g}"
            for index in scaled[:NAMED]
        )
        text = f"{scaled.size} gradients are scaled {over}: {worst}"
    if of_all or scaled.size:
        own = float(np.abs(errors.scales[scaled[0]])) if scaled.size else 0.0
        if not of_all and not own <= errors.scale_limits[scaled[0]]:
            measured, limit = own, float(errors.scale_limits[scaled[0]])
        return CheckResult(
            Outcome.FAIL,
            f"{text} {over}" if of_all else text,
            measured=measured,
            limit=Limit(limit, _ALONG),
            unit="relative",
            onset=1,
        )
    nearest = int(np.argmax(errors.scale_excess))
    zero = int(np.count_nonzero(~errors.rounded))
    left_out = f"; {zero} of {len(errors.names)} gradients are zero, or not rounded" if zero else ""
    return CheckResult(
        Outcome.PASS,
        f"nearest to its limit is {errors.names[nearest]} {over}{left_out}",
        measured=float(np.abs(errors.scales[nearest])),
        limit=Limit(float(errors.scale_limits[nearest]), _ALONG),
        unit="relative",
    )


@check(Tier.FIRST_STEP)
def drawn_alike(errors: Errors | None) -> CheckResult:
    """Random numbers move gradients by as much as in the control.

    Another dropout rate, none at all, or added noise: the random numbers themselves are wrong.
    """
    if errors is None or errors.drawing is None:
        return skipped("nothing is known about the random numbers")
    found = list(unlike(errors.drawing, errors.names, ALARMS))
    if not found:
        most = float(errors.drawing.test.max())
        return passed(f"by up to {most:.2g} of a gradient's norm, or the control draws nothing")
    text = ", ".join(f"{name} by {factor:.3g} times as much" for name, factor in found[:NAMED])
    more = " …" if len(found) > NAMED else ""
    return CheckResult(
        Outcome.FAIL,
        f"random numbers do not move gradients as in the control: {text}{more}",
        onset=1,
    )


@check(Tier.FIRST_STEP)
def frozen_loss(
    test: Evidence, control: Evidence, errors: Errors | None, measure: PrecisionRuns | None
) -> CheckResult:
    """At frozen weights the loss of every batch is the matched control's, except for rounding.

    The forward pass or the objective differs, on the samples of many batches and at weights that
    were not updated.
    """
    if errors is None or measure is None:
        return _unmeasured(test, control, measure)
    if not errors.frozen:
        return skipped("one batch does not show how much rounding changes a loss: frozen = 0")
    if not np.all(np.isfinite(errors.loss)) or not np.isfinite(errors.loss_error):
        return CheckResult(Outcome.FAIL, "the loss of a frozen batch is not finite", onset=1)
    size = float(np.sqrt(np.mean(errors.loss**2)))
    mean = float(errors.loss.mean())
    t = float(student(np.array(ALARMS / 4), errors.batches))
    # Of two independent errors the difference is sqrt(2) times as large.
    chance = errors.loss_error * np.sqrt(2) * t
    lasting = errors.loss_error * np.hypot(LASTING_SPREAD, np.sqrt(2) * t / np.sqrt(errors.batches))
    if errors.drawing is not None:  # random numbers move every loss, but hardly their mean
        size, chance = furthest(errors.loss), chance + by_chance(errors.loss)
        lasting = np.hypot(lasting, mean_by_chance(errors.loss, ALARMS / 4))
    outside = not (size <= chance and abs(mean) <= lasting)
    whole, limit = (abs(mean), lasting) if abs(mean) > lasting else (size, chance)
    return CheckResult(
        Outcome.FAIL if outside else Outcome.PASS,
        f"off by {mean:+.2g} on average over {_batches(errors)}, {size:.2g} rms; rounding of "
        f"{measure.matched.name} alone is {errors.loss_error:.2g}",
        measured=whole,
        limit=Limit(float(limit), f"the error of {measure.matched.name} against float32"),
        unit="relative",
        onset=1 if outside else None,
    )


CHECKS: tuple[Question, ...] = (reference_sound, gradient_errors, gradient_scale, frozen_loss)


def _unmeasured(test: Evidence, control: Evidence, measure: PrecisionRuns | None) -> CheckResult:
    if measure is None and {test.precision, control.precision} == {Precision.FP32}:
        return passed("both runs compute in float32: limits are those of its rounding")
    return skipped(f"{_NONE}: limits are those of repeats, or fixed")


def _errors_sentence(errors: Errors, outside: np.ndarray, worst: int) -> str:
    over = f"over {_batches(errors)}"
    if not outside.size:
        return (
            f"nearest to its limit is {errors.names[worst]}, {errors.ratio[worst]:.2f} times as "
            f"far from float32 as in the matched control {over}"
        )
    text = ", ".join(
        f"{errors.names[index]} {errors.ratio[index]:.3g} times as far" for index in outside[:NAMED]
    )
    more = " …" if outside.size > NAMED else ""
    return (
        f"{outside.size} of {len(errors.names)} gradients are further from float32 than rounding "
        f"explains {over}: {text}{more}"
    )


def _batches(errors: Errors) -> str:
    return f"{errors.batches} frozen batches" if errors.frozen else "the first step"
