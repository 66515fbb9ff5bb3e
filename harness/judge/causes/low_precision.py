"""C1, C2 and C4 in low precision: errors above rounding, measured from a float32 reference."""

from __future__ import annotations

import numpy as np

from converge_harness.judge.causes.context import Context, digits
from converge_harness.judge.causes.factors import FrozenMatch, NamedFactor, named_factor
from converge_harness.judge.causes.forward import (
    LEAST_LOSS,
    SAME_BITS,
    look_in_forward,
    same_program,
)
from converge_harness.judge.causes.location import (
    Spot,
    family,
    of_scores,
    scores_scaled,
    spot_of,
    stage_clause,
)
from converge_harness.judge.causes.parameter_names import describe
from converge_harness.judge.causes.signature import Basis, Cause, ComparisonKind, Stage, signature
from converge_harness.judge.compare.precision_errors import Errors, measure_errors
from converge_harness.judge.compare.random_numbers import drawn, in_force
from converge_harness.model import CauseClass, Evidence, Floats, InForce, Integers

_STEADY = 4.0
"""A factor is one for all batches where its mean is so many times its standard error."""
_MATCH = 3e-3
"""How near to a quantity a factor of low precision must be to equal it."""
_MOST = 3
_LEAST_OF_ROUNDING = 0.25
"""Share of the matched control's error of the loss: two correct programs of one precision round
mostly alike, and their losses are nearer to each other than to float32 (measured: TP 2 at 0.16 of
it, CP 2 at 1e-4, each against one device in bf16 mixed)."""
_SKETCHED = 1.1
"""Errors are estimated from sketches: over 16 batches a tenth more is four standard deviations."""
_SCALE_AT = (
    "where gradients are divided: loss scaling by valid tokens, gradient_divide_factor of FSDP"
)
_TOKENS_AT = (
    "how the loss is normalised: over which tokens, microbatches and ranks it is averaged, where "
    "batches have uneven valid tokens"
)
_FORWARD_AT = (
    "the forward pass of these modules on the samples that differ (positions, masks, document "
    "boundaries, casts), and their backward pass"
)


@signature(Basis.EXACT, Stage.FORWARD)
def draws_by_itself(context: Context) -> Cause | None:
    """Only random numbers: gradients differ in every batch, and agree on average.

    A set with its control's program and layout has to draw the control's random numbers. One with
    other degrees or batches, or whose control draws none, may be correct; only the user who set
    it up knows.
    """
    runs, measure, errors = context.compared, context.compared.measure, context.compared.errors
    if measure is None or errors is None or runs.draws or not context.failed("gradient-errors"):
        return None
    ours, theirs = drawn(runs.test), drawn(measure.matched)
    if ours is None or theirs is None or not in_force(ours, errors.matched):
        return None
    control_draws = in_force(theirs, errors.matched)
    if control_draws and _layout(runs.test) == _layout(measure.matched):
        return None
    in_the_mean = measure_errors(runs.test, measure, draws=True)
    if in_the_mean is None or in_the_mean.beyond.any() or in_the_mean.all_scaled:
        return None
    control = "has another layout, and draws others" if control_draws else "draws none"
    sentence = (
        f"the test set draws random numbers, and its control {control}: two passes over one batch "
        f"at the same weights move its gradients by up to {ours.max():.2g} of their norms, and "
        f"averaged over {in_the_mean.batches} frozen batches they agree with the control's"
    )
    look_at = (
        "dropout and stochastic rounding: which generator draws, with which seed on which rank; if "
        "the set should draw other numbers than its control, say own_random_numbers = true"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)


@signature(Basis.FIRST_TENSORS, Stage.FORWARD, asked_of=(ComparisonKind.DRAWING,))
def drawn_otherwise(context: Context) -> Cause | None:
    """A set that draws more or fewer random numbers than its control."""
    if not context.failed("drawn-alike"):
        return None
    look_at = "the rate of dropout, where it is switched on, and what else adds noise"
    return Cause(context.detail("drawn-alike"), CauseClass.OBJECTIVE, look_at)


def _layout(run: Evidence) -> tuple[object, ...]:
    """What decides, in one program, which random numbers a rank draws."""
    ran = run.in_force or InForce()
    return ran.degrees, ran.local_batch_size, ran.gradient_accumulation_steps, ran.compile


@signature(
    Basis.FIRST_TENSORS,
    Stage.BACKWARD,
    # Frozen steps show a factor more exactly than a norm does.
    overrides=("faintly_scaled",),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.DRAWING),
)
def beyond_rounding(context: Context) -> Cause | None:
    """Differences that frozen steps show and the first step's wider limits do not."""
    errors = context.compared.errors
    if errors is None:
        return None
    if context.failed("frozen-loss"):
        return _objective(context)
    if context.failed("gradient-errors"):
        return _scaled_group(context, errors) or _direction(context, errors)
    if context.failed("gradient-scale"):
        return _scaled(context, errors)
    return None


@signature(
    Basis.FIRST_TENSORS,
    Stage.BACKWARD,
    # A wrong forward pass does not only scale all gradients.
    overrides=(
        "hidden_forward",
        "beyond_rounding",
    ),
    asked_of=(ComparisonKind.ORDINARY, ComparisonKind.DRAWING),
)
def scaled_at_frozen_weights(context: Context) -> Cause | None:
    """C1: the norms of all gradients are off by one factor, many of them inside wider limits."""
    errors = context.compared.errors
    if errors is None or not (
        context.failed("gradient-scale") or context.failed("gradient-errors")
    ):
        return None
    if context.failed("frozen-loss") or not (errors.all_scaled and _scale_explains(errors)):
        return None
    return _scaled(context, errors)


@signature(Basis.FIRST_TENSORS, Stage.FORWARD)
def forward_at_frozen_weights(context: Context) -> Cause | None:
    """C4 that the loss hardly shows: a slight change, and gradients that no backward bug explains.

    A backward pass that differs does not change the loss: to the last bit where the same program
    computes it, and else within part of the rounding by which two correct programs differ.
    """
    errors = context.compared.errors
    if errors is None or not errors.frozen or not context.failed("gradient-errors"):
        return None
    if context.failed("same-initial-parameters") or not np.all(np.isfinite(errors.loss)):
        return None
    if context.failed("frozen-loss"):
        return _objective(context)
    if _scaled_group(context, errors):
        return None  # a wrong forward pass does not only scale gradients
    found = _where_forward_differs(context, errors)
    if found is None:
        return None
    place, why = found
    where = f"in {place.text} " if place is not None else ""
    off = int(np.count_nonzero(errors.beyond))
    same = same_program(context)
    than = ", where the same program on the same samples would give the same loss" if same else ""
    sentence = (
        f"the forward pass differs {where}by less than the limit of the loss: {off} of "
        f"{len(errors.names)} gradients are wrong by more than rounding at the initial weights, "
        f"worst {_worst(errors)}; the loss is off by {_rms(errors.loss):.2g} rms{than}, {why}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, look_in_forward(context, place))


def _where_forward_differs(context: Context, errors: Errors) -> tuple[Spot | None, str] | None:
    """The place, if it is one, and why; None where only the backward pass may differ."""
    size, same = _rms(errors.loss), same_program(context)
    if size <= (SAME_BITS if same else LEAST_LOSS):
        return None
    beyond = np.sqrt(np.maximum(errors.test**2 - errors.matched**2, 0.0))
    place = spot_of(errors.names, beyond)
    noticed = same or size > _LEAST_OF_ROUNDING * errors.loss_error
    # Unreduced gradients are those of a whole layer, hardly of one branch in every layer.
    if place is not None and place.last_too and (noticed or place.every):
        return place, (
            "and the last weight there is off as the first, so the activations there differ"
        )
    if np.count_nonzero(errors.beyond) > len(errors.names) / 2 and (
        same or size > errors.loss_error
    ):
        return None, "and most gradients are off by more than rounding"
    return None


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _worst(errors: Errors) -> str:
    ratio = np.where(errors.beyond, np.nan_to_num(errors.ratio, nan=np.inf), 0.0)
    furthest = np.argsort(-ratio, kind="stable")[:_MOST]
    return ", ".join(
        f"{errors.names[index]} ({ratio[index]:.3g} times the rounding)"
        if np.isfinite(ratio[index])
        else f"{errors.names[index]} (no finite gradient)"
        for index in furthest
        if ratio[index]
    )


def _objective(context: Context) -> Cause:
    sentence = (
        "the forward pass or the objective differs: the loss at the initial weights is "
        f"{context.detail('frozen-loss')}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _TOKENS_AT)


def _scaled(context: Context, errors: Errors) -> Cause:
    """Directions are right: all gradients, or those of some parameters, have another norm."""
    if not errors.all_scaled:
        return _of_group(context, errors, np.sort(errors.scaled))
    of_batch = errors.scale_of_rounded.mean(axis=1)
    mean = float(of_batch.mean())
    error = float(of_batch.std(ddof=1) / np.sqrt(len(of_batch))) if len(of_batch) > 1 else 0.0
    named = _named(context, np.exp(of_batch))
    what = f"all {np.count_nonzero(errors.rounded)} parameters alike"
    if abs(mean) > _STEADY * error:
        return _by_factor(digits(float(np.exp(mean))), named, what)
    varies = (
        f"a factor that varies from batch to batch, {np.expm1(of_batch.min()):+.2g} to "
        f"{np.expm1(of_batch.max()):+.2g}"
    )
    if named.text:
        return _by_factor(varies, named, what)
    sentence = (
        f"the loss is averaged differently: all gradients are scaled by {varies}, in directions "
        "that are right"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _TOKENS_AT)


def _named(context: Context, factors: Floats) -> NamedFactor:
    """What the factors of the batches equal; training uses the same batches from step 1 on.

    The first is left out, because some quantities are those of the step before.
    """
    test, control = context.compared.test, context.compared.control
    trained = int(test.steps.max(initial=1))
    factors = factors[:trained]
    steps = np.arange(1, len(factors) + 1, dtype=np.int64)
    match = FrozenMatch(_MATCH)
    named = named_factor(factors, steps, test, control, match)
    if named.text or len(factors) == 1:
        return named
    return named_factor(factors[1:], steps[1:], test, control, match)


def _scale_explains(errors: Errors) -> bool:
    """Whether one factor for all parameters, different in each batch, explains all but rounding."""
    middle = np.median(errors.scale_of_rounded, axis=1)
    deviation = np.abs(errors.scales - middle.mean())
    if np.any(~(deviation <= errors.scale_limits)[errors.rounded]):
        return False
    factor = _SKETCHED * np.sqrt(np.mean(np.expm1(middle) ** 2))
    return bool(np.all(errors.test <= np.hypot(errors.multiple * errors.matched, factor)))


def _of_group(context: Context, errors: Errors, members: Integers) -> Cause:
    """Gradients of some parameters have another norm."""
    names = [errors.names[index] for index in members]
    factor = float(np.exp(np.median(errors.scales[members])))
    what = describe(names, list(errors.names))
    if of_scores(names):
        return scores_scaled(factor, f"at the initial weights ({what})")
    named = _named(context, np.array([factor]))
    return _by_factor(digits(factor), named, what, CauseClass.GROUP_SCALE)


def _by_factor(
    factor: str, named: NamedFactor, what: str, kind: CauseClass = CauseClass.GRADIENT_SCALE
) -> Cause:
    known = f", which equals {named.text}" if named.text else ""
    sentence = (
        f"gradients are scaled by {factor}{known}: {what}, at the initial weights, in directions "
        "that are right except for rounding"
    )
    return Cause(sentence, kind, f"{named.where}; {_SCALE_AT}" if named.where else _SCALE_AT)


def _scaled_group(context: Context, errors: Errors) -> Cause | None:
    """Errors that one factor explains, the same for all parameters that are off."""
    off = np.flatnonzero(errors.beyond)
    scales = errors.scales[off]
    # An error of the norm only: |g - r| is |factor - 1| |r|, plus rounding.
    explained = np.abs(np.expm1(scales)) >= 0.9 * np.sqrt(
        np.maximum(errors.test[off] ** 2 - errors.matched[off] ** 2, 0.0)
    )
    if not off.size or not explained.all():
        return None
    spread = float(scales.max() - scales.min())
    if spread > 0.1 * abs(float(np.median(scales))):
        return None
    if len(off) == np.count_nonzero(errors.rounded):
        named = _named(context, np.exp(errors.scale_of_rounded.mean(axis=1)))
        factor = float(np.exp(np.median(scales)))
        return _by_factor(digits(factor), named, f"all {len(off)} parameters alike")
    return _of_group(context, errors, off)


def _direction(context: Context, errors: Errors) -> Cause:
    off = np.flatnonzero(errors.beyond)
    names = [errors.names[index] for index in off]
    among = list(errors.names)
    hint = family(names, among, context)
    clue = f"; {hint.text}" if hint.text else ""
    sentence = (
        f"{len(off)} of {len(among)} gradients are wrong by more than rounding at the initial "
        f"weights, while the loss is right within it: worst {_worst(errors)}"
        f"{stage_clause(names, among, context)}{clue}"
    )
    look_at = "; ".join(filter(None, (hint.look_at, _FORWARD_AT)))
    return Cause(sentence, CauseClass.GRADIENT_DIRECTION, look_at)
