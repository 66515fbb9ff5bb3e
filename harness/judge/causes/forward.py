"""C4: the forward pass or the objective differs, often by less than the loss shows.

At random initial weights a loss hardly depends on attention, and in low precision rounding hides
the rest. Five observations still show whether the forward or the backward pass differs:

- If the recomputed loss is the same to the last bit, the forward pass is the same, too.
- Where a module's output in the first batches is off by more than rounding, it is not.
- An error in the backward pass of a layer does not affect gradients between it and the loss. Where
  those are off as well, the hidden states are.
- The gradient of a branch's last weight is the branch's hidden state times the gradient of the
  residual stream, which all layers below share. Where it is off and theirs are not, the hidden
  state is.
- Two runs with the same weights and the same samples have the same loss. Where a sample shows that
  the weights of step N are the same and the loss of step N + 1 differs, the forward pass differs.

An objective that is not the mean cross entropy of the logits, or is another mean of it, shows when
the reported loss is compared with the recomputed one.
"""

from __future__ import annotations

import numpy as np

from converge_harness.judge.causes.backward import name_of
from converge_harness.judge.causes.context import (
    Context,
    begins,
    off_at_first_step,
    ratio_text,
    signal_name,
)
from converge_harness.judge.causes.factors import FIRST_STEP_MATCH
from converge_harness.judge.causes.first_wrong import amount_of, comparable_modules
from converge_harness.judge.causes.gradient_patterns import (
    OUTWEIGHS,
    Wrong,
    rounding_clause,
    worst_tensors,
    wrong_gradients,
)
from converge_harness.judge.causes.location import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    Spot,
    differences,
    own_additions,
    spot,
)
from converge_harness.judge.causes.parameter_names import (
    ParameterRole,
    depth_of,
    describe,
    joined,
    layers_of,
    role_of,
)
from converge_harness.judge.causes.signature import Basis, Cause, Stage, signature
from converge_harness.judge.causes.terms import divisor_clause
from converge_harness.judge.compare.dropout_masks import masks_by_step
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.limits import rounding_of_experts, routed, same_sample_layout
from converge_harness.judge.compare.random_states import drawing
from converge_harness.judge.compare.reported import agreement
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.model import CauseClass, Outcome, Precision
from converge_harness.wording import distinct_digits

SAME_BITS = 1e-14
"""Relative difference of two sums in float64 of the same numbers."""
LEAST_LOSS = 1e-8
"""Of the recomputed loss at step 1: an ulp on every weight of a float32 model moves it by 4e-9,
another sharding by 3e-10 (as measured for ``converge_harness.judge.compare.floors``). No limit is
that low, for larger models; gradients that are off as well show that it is not rounding."""
BEYOND = 3.0
"""Multiple of the repeats' spread."""
_DOWNSTREAM = 10.0
"""Multiple of the repeats' spread, in float32: limits allow three times as much."""
_SLIGHT = 0.1
"""A gradient that is not reduced, or not propagated, is off by more than this."""


@signature(
    Basis.FIRST_TENSORS,
    Stage.FORWARD,
    # The first step of training is asked before frozen steps.
    overrides=("forward_at_frozen_weights",),
)
def hidden_forward(context: Context) -> Cause | None:
    """C4: the forward pass of the first step differs, and the loss is inside its limit."""
    loss = context.compared.envelopes.get("loss_recomputed")
    if loss is None or off_at_first_step(loss) or loss.difference[0] <= SAME_BITS:
        return None
    step = int(loss.steps[0])
    wrong = wrong_gradients(context.sample(step))
    if wrong is None or wrong.sorting.gone or context.failed("same-initial-parameters"):
        return None
    if _only_scaled(wrong):
        return None
    place = spot(context.sample(step))
    why = _by_loss(loss, wrong, context) or _by_modules(context)
    if not why and (why := _by_gradients(wrong, place, context)):
        why += rounding_clause(wrong, context)
    if not why:
        return None
    where = f"in {place.text} " if place is not None else ""
    sentence = (
        f"the forward pass differs {where}by less than the limit of the loss: "
        f"{len(wrong.off)} of {len(wrong.among)} gradients are off at step {step}"
        f"{_worst(wrong)}; {signal_name(loss)} is off by {loss.difference[0]:.2g}, {why}"
        f"{_only_addition(context)}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, look_in_forward(context, place))


@signature(Basis.LATER_TENSORS, Stage.FORWARD)
def forward_on_new_data(context: Context) -> Cause | None:
    """C4, beginning later: weights agree, and the loss of the next samples does not."""
    loss = context.compared.envelopes.get("loss_recomputed")
    resumed = context.compared.test.passes or context.compared.test.replayed
    if loss is None or resumed or context.outcome("same-data") is not Outcome.PASS:
        return None
    step = _parts_at(loss)
    first = context.first_failure()
    if step is None or (first is not None and first < step):
        return None
    before = [sample for sample in context.compared.tensors if sample.step < step]
    if not before or not all(_agrees(sample, context) for sample in before):
        return None
    here, index = context.sample(step), loss.index_of(step)
    place = spot(here)
    last = before[-1]
    if last.step == step - 1 and last.updates is not None:
        known = f"all weights agree after step {last.step}"
    elif place is not None and place.last_too and _as_before(context, step):
        known = (
            f"all before agrees, and at step {step} the gradients of {place.text} are off by "
            f"{place.difference:.2g}, all others by {place.others:.2g} or less"
        )
    else:
        return None
    sentence = (
        f"the forward pass differs on the data of step {step}: {known}, and {signal_name(loss)} of "
        f"step {step} on the same samples is off by {loss.difference[index]:.2g}, where it was "
        f"off by {loss.difference[:index].max():.1g} at most"
    )
    look_at = (
        f"what the samples of step {step} have and those before it have not (lengths, document "
        f"boundaries, padding, ignored labels): {look_in_forward(context, place)}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)


def look_in_forward(context: Context, place: Spot | None = None, *, reported: bool = False) -> str:
    """What to look at first when a forward pass differs: what was added, where gradients are off.

    ``reported``: the loss is the trainer's own, which may be averaged differently.
    """
    news = differences(context)
    kinds = {word.split(" ")[0] for word in news}
    known = [text for name, text in _ADDED if name in kinds and (reported or name not in _MEANS)]
    known += [
        f"what {each.name} makes of {joined(each.modules)}"
        for each in own_additions(context)
        if each.modules
    ]
    first = (
        f"what {joined(news)} changes in the forward pass: {'; '.join(known)}; then "
        if known
        else ""
    )
    if place is not None:
        return f"{first}the forward of {place.text}: {_INSIDE[place.kind]}"
    mean = (
        "how the loss is averaged over valid tokens of ranks and microbatches, " if reported else ""
    )
    return (
        f"{first}{mean}labels (their shift, those that are ignored), positions and masks, norms "
        "(epsilon, precision), casts, and the random numbers of dropout on each rank"
    )


def _only_addition(context: Context) -> str:
    """``; its only addition is fused_norm, which changes RMSNorm``; empty if there are others."""
    own = own_additions(context)
    if not own or len(differences(context)) != len(own):
        return ""
    changes = [
        each.name + (f", which changes {joined(each.modules)}" if each.modules else "")
        for each in own
    ]
    only = "its only addition to the control is" if len(own) == 1 else "it adds to the control only"
    return f"; {only} {'; '.join(changes)}"


_INSIDE = {
    ATTENTION: "positions and rotary tables, masks and document boundaries, the scale, how heads "
    "are split and repeated, the norm before it, casts and dropout",
    FEED_FORWARD: "the norm before it (epsilon, where it is added, precision), the activation and "
    "its gate, what is split over tp, casts and dropout",
    EXPERTS: "routing, dispatch and combine of tokens, scores and their scale, the norm before it",
}
_MEANS = ("gradient", "dp_replicate", "dp_shard")
_ADDED = (
    ("cp", "positions, masks and the dimension on which keys and values are gathered"),
    ("tp", "what is sharded: heads, vocabulary (loss parallel, label smoothing), sequence"),
    ("pp", "the order of stages and how batches are split into microbatches"),
    ("ep", "routing, dispatch and combine of tokens"),
    ("compile", "casts that the compiler removes or fuses"),
    ("async_tp", "the dimension that fused matmuls gather and scatter"),
    ("float8", "which layers are converted, and their scaling"),
    ("gradient", "averages of averages over microbatches with uneven valid tokens"),
    ("dp_replicate", "averages of averages over ranks with uneven valid tokens"),
    ("dp_shard", "averages of averages over ranks with uneven valid tokens"),
)
"""By what the test set adds to its control; the probe's loss does not depend on how it averages."""


def same_program(context: Context) -> bool:
    """Whether both runs add up the same numbers in the same order, as far as is recorded."""
    return same_sample_layout(context.compared.test, context.compared.control) and not differences(
        context
    )


def spread_of(loss: Envelope, context: Context) -> float:
    """What repeats of the control differ by at the first step; 0 where there are none."""
    calibration = context.compared.calibration
    learnt = calibration.signals.get(loss.signal) if calibration else None
    return float(learnt.scale[0]) if learnt is not None else 0.0


def _by_loss(loss: Envelope, wrong: Wrong, context: Context) -> str:
    """Whether the loss is off by more than rounding: its limit is a multiple of that."""
    spread = spread_of(loss, context)
    if not loss.difference[0] > max(LEAST_LOSS, BEYOND * spread):
        return ""
    every = len(wrong.off) == len(wrong.among) and context.precision is Precision.FP32
    if not every and not (spread and same_program(context)):
        return ""
    known = f" (repeats of the control: {spread:.1g})" if spread else ""
    return (
        f"which is inside its limit and more than rounding{known}: at initial weights a loss "
        "hardly depends on some parts of a model, attention above all"
    )


def _by_modules(context: Context) -> str:
    """Whether modules compute something else, by more than repeats of the control show.

    Of a model that routes tokens they have to show how experts round.
    """
    modules = comparable_modules(context.compared, context.checks)
    first = modules.first_off if modules is not None else None
    calibration, control = context.compared.calibration, context.compared.control
    if first is None or first.row.backward or calibration is None:
        return ""
    unknown = routed(control, control) and not rounding_of_experts(control, calibration)
    if first.row not in calibration.modules or unknown:
        return ""
    what = "what {} gets" if first.row.is_input else "the output of {}"
    return f"which is inside its limit, but {what.format(first.row.module)} {amount_of(first)}"


def _by_gradients(wrong: Wrong, place: Spot | None, context: Context) -> str:
    """Why the forward pass is wrong: gradients are off that this backward pass does not reach."""
    if place is None or not wrong.sorting.turned:
        return ""
    after = _off_downstream(wrong, place, context)
    if after:
        return (
            f"and so are the gradients of {after}, between {place.text} and the loss, which its "
            "backward pass does not reach"
        )
    if place.last_too and place.difference < _SLIGHT:
        return (
            "as rounding may; but the last weight there is off as much as the first, while all "
            f"others are off by {place.others:.1g} or less, so the activations there differ, and "
            "not only the gradients"
        )
    return ""


def _off_downstream(wrong: Wrong, place: Spot, context: Context) -> str:
    """Which parameters above a place are off by more than rounding; empty for none.

    Below float32, rounding is as large as what the residual stream carries.
    """
    layers = layers_of(wrong.names)
    calibration = context.compared.calibration
    known = calibration.tensors.get(wrong.step) if calibration else None
    if context.precision is not Precision.FP32 or not layers:
        return ""
    above = [
        index
        for index in wrong.sorting.judged
        if depth_of(wrong.names[index], layers[-1]) > place.layers[-1]
    ]
    limit = wrong.found.limit
    if known is not None and known.gradient is not None and known.names == wrong.names:
        limit = np.minimum(limit, _DOWNSTREAM * known.gradient)
    off = [wrong.names[index] for index in above if wrong.found.difference[index] > limit[index]]
    return describe(off, wrong.names) if above and len(off) * 2 > len(above) else ""


def _only_scaled(wrong: Wrong) -> bool:
    """Whether factors explain all: a wrong forward pass does not only scale a gradient."""
    sorting = wrong.sorting
    return not sorting.turned and all(
        abs(each.factor - 1) > OUTWEIGHS * each.residual for each in sorting.scaled
    )


def _worst(wrong: Wrong) -> str:
    return f", worst {worst_tensors(wrong)}" if wrong.sorting.turned else ""


def _parts_at(loss: Envelope) -> int | None:
    """The step, after the first, at which the loss begins to differ."""
    differing = np.flatnonzero(loss.difference > SAME_BITS)
    if differing.size and differing[0] > 0:
        return int(loss.steps[differing[0]])  # the same bits until then
    onset = loss.onset
    if onset is None or not loss.index_of(onset) or not begins(loss, loss.index_of(onset)):
        return None
    return onset


def _agrees(sample: TensorComparison, context: Context) -> bool:
    """Whether a sample equals the control's, more strictly than limits: updates amplify rounding.

    To the last bit; or, in float32, as nearly as repeats of the control do.
    """
    kinds = (sample.initial, sample.gradients, sample.updates)
    if any(found is not None and found.outside.size for found in kinds):
        return False
    if sample.updates is None or not sample.updates.difference.any():
        return True
    calibration = context.compared.calibration
    known = calibration.tensors.get(sample.step) if calibration else None
    if context.precision is not Precision.FP32 or known is None or known.update is None:
        return False
    spread = dict(zip(known.names, known.update.tolist(), strict=True))
    allowed = [BEYOND * spread.get(name, 0.0) for name in sample.names]
    return bool(np.all(sample.updates.difference <= allowed))


def _as_before(context: Context, step: int) -> bool:
    """Whether nothing shows that the update before a step differed."""
    norm = context.compared.envelopes.get("grad_norm_recomputed")
    return norm is not None and (norm.onset is None or norm.onset >= step)


_ALIKE = 0.1
"""Two factors are the same within this share of their difference from 1."""
_LOOK_AT = (
    "how the loss is normalised: by which count of tokens (padding, ignored labels), microbatches "
    "and ranks it is divided, and how often"
)
_DIVIDED = "the loss is divided by another count, or weighted"
_TURNED = "the loss has the other sign, so training raises what the control lowers"
_WHERE_TURNED = (
    "where the loss is negated (an objective to be maximised, a gain, a reward), and how often"
)


@signature(
    Basis.FIRST_TENSORS,
    Stage.OBJECTIVE,
    # One factor of all says more than what it may come from, which its sentence has, too.
    overrides=("term_differs",),
)
def scaled_objective(context: Context) -> Cause | None:
    """The trainer's own loss and every gradient are one multiple; only the cross entropy agrees.

    Scaling gradients after the backward pass does not change the loss, and scaling the loss for the
    log does not change the gradients.
    """
    loss, truth = (context.compared.envelopes.get(name) for name in ("loss", "loss_recomputed"))
    if loss is None or truth is None or not off_at_first_step(loss) or off_at_first_step(truth):
        return None
    step = int(loss.steps[0])
    wrong = wrong_gradients(context.sample(step))
    scaled = wrong.sorting.factor_of_all if wrong is not None else None
    if scaled is None:
        return None
    ratio = float(loss.test[0] / loss.control[0]) if loss.control[0] else 0.0
    if abs(ratio - scaled.factor) > _ALIKE * abs(ratio - 1):
        return None
    named = name_of(scaled, step, context)
    equals = f", which equals {named.text}" if named.text else ""
    sentence = (
        f"the objective is scaled: the trainer's loss and all {len(scaled.members)} gradients are "
        f"{ratio_text(loss, 0)} times the control's at step {step}{equals}, while the cross "
        f"entropy of the same logits agrees: {_TURNED if scaled.factor < 0 else _DIVIDED}"
        f"{divisor_clause(context)}"
    )
    if scaled.factor < 0:
        return Cause(sentence, CauseClass.OBJECTIVE, _WHERE_TURNED)
    look_at = f"{named.where}; {_LOOK_AT}" if named.where else _LOOK_AT
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)


_ADDED_TERM = (
    "what is added to the loss (z-loss, label smoothing, auxiliary losses), and by how much"
)
_FEWEST_STEPS = 3
_OWN_ROUNDING = 5e-7
"""A few ulps of float32: by so much rounding may change a reported from a recomputed loss."""
_STEADY = 0.2
"""How much an added term may change from step to step, relative to its own size."""
_LOST = 2.0**-8
"""Share of the cross entropy: rounding to bfloat16 does not hide gradients of a larger term."""
_FAR = 3.0
"""Multiple of its limit: below fp32 correct programs differ by more than few repeats show."""
_AS_MUCH = 0.3
"""Share of the loss's difference: another objective changes gradients by at least that."""


@signature(
    Basis.FIRST_TENSORS,
    Stage.OBJECTIVE,
    # Gradients that change with it are proof; without them a term may be in the log only.
    overrides=("added_term",),
)
def trained_objective(context: Context) -> Cause | None:
    """The trainer's own loss differs and the gradients with it; only the cross entropy agrees.

    The objective is another mean of the same logits (per rank, per microbatch), or has a term that
    the probe does not recompute (label smoothing).
    """
    truth = context.compared.envelopes.get("loss_recomputed")
    if truth is None or off_at_first_step(truth) or context.failed("same-initial-parameters"):
        return None
    seen = _another_loss(context)
    follow = _gradients_follow(context, truth) if seen else ""
    if not follow:
        return None
    sentence = (
        f"the objective differs: {seen} and {follow}, while the cross entropy of the same logits "
        "agrees: tokens, microbatches or ranks have other weights in the mean, or what is added "
        "to it differs"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, f"{_LOOK_AT}; {_ADDED_TERM}")


@signature(Basis.FIRST_TENSORS, Stage.OBJECTIVE)
def added_term(context: Context) -> Cause | None:
    """The loss has a term beside the cross entropy, whose gradients are lost in low precision.

    A wrong metric is off by a factor, late, or off in both directions. An added term always has one
    sign and changes as slowly as the model does.
    """
    loss = context.compared.envelopes.get("loss")
    off = (loss is not None and loss.onset is not None) or context.failed(_MISREPORTED)
    own = _own_mean(context)
    if context.precision is Precision.FP32 or own is None or not off:
        return None
    compared = agreement(context.compared.test, "loss")
    if compared is None:
        return None
    added = compared.reported - compared.recomputed
    share = added / compared.recomputed
    size = float(np.median(np.abs(added)))
    steady = np.abs(np.diff(added)).max() <= _STEADY * size and np.all(added * added[0] > 0)
    fixed = np.ptp(share) <= _OWN_ROUNDING
    if not steady or fixed or np.abs(share).max() > _LOST:
        return None
    same = _all_the_same(context)
    sentence = (
        f"the objective has another term: the loss that the trainer reports is the cross entropy "
        f"of its logits {'plus' if added[0] > 0 else 'minus'} {np.abs(added).min():.3g} to "
        f"{np.abs(added).max():.3g}, always of one sign and by no fixed factor, as a term that "
        f"is added to the objective is; gradients {same}, so it may be that only the log has it"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _ADDED_TERM)


_MISREPORTED = "reported-loss-is-recomputed"


def _all_the_same(context: Context) -> str:
    sample = next((each for each in context.compared.tensors if each.gradients is not None), None)
    furthest = float(sample.gradients.difference.max()) if sample and sample.gradients else 0.0
    if sample is not None and not furthest:
        return f"are the control's to the last bit, as {context.precision.value} arithmetic rounds"
    return f"do not show it within the limits of {context.precision.value} arithmetic"


def _another_loss(context: Context) -> str:
    """A clause that shows that the trainer's own loss differs from the control's; else empty."""
    loss, own = context.compared.envelopes.get("loss"), _own_mean(context)
    if loss is not None and off_at_first_step(loss):
        return (
            f"the trainer's loss is {loss.test[0]:.8g} (control: {loss.control[0]:.8g}) at step "
            f"{loss.steps[0]} (relative {loss.difference[0]:.2g})"
        )
    if own is None:
        return ""
    return (
        f"the loss that the trainer minimises is not the mean cross entropy (they differ by "
        f"{own:.1g} over the steps, in the control they do not)"
    )


def _gradients_follow(context: Context, truth: Envelope) -> str:
    """A clause on gradients that shows that not only the log of the loss differs; else empty."""
    step = int(truth.steps[0])
    sample = context.sample(step)
    wrong = wrong_gradients(sample)
    if wrong is not None and _as_an_objective(wrong, context):
        count = f"all {len(wrong.off)}" if _all_off(wrong) else f"{len(wrong.off)}"
        worst = f", worst {worst_tensors(wrong)}" if wrong.sorting.turned else ""
        return f"{count} gradients follow it at step {step}{worst}"
    if sample is None or truth.difference[0] > SAME_BITS or not same_program(context):
        return ""
    moved = _moved(sample)
    if not moved:
        return ""
    return (
        f"gradients follow it: the forward pass of step {step} is the same to the last bit, and "
        f"{moved}"
    )


def _as_an_objective(wrong: Wrong, context: Context) -> bool:
    """Whether gradients are off as those of another objective are: all, by no single factor.

    In low precision most may be inside their limits. But the first in the backward pass is far
    outside, by as much as the loss.
    """
    if wrong.sorting.gone or wrong.sorting.factor_of_all is not None:
        return False
    if context.precision is Precision.FP32:
        return _all_off(wrong)
    first = [
        index
        for index in wrong.found.outside
        if role_of(wrong.names[index]) is ParameterRole.OUTPUT
    ]
    loss = context.compared.envelopes.get("loss")
    of_loss = float(loss.difference[0]) if loss is not None else 0.0
    furthest = float(wrong.found.difference.max())
    far = _all_off(wrong) or bool((wrong.found.excess[first] > _FAR).any())
    return far and furthest > _AS_MUCH * of_loss


def _all_off(wrong: Wrong) -> bool:
    return len(wrong.off) == len(wrong.among)


def _moved(sample: TensorComparison) -> str:
    """A clause on the gradients whose bits differ, if most do, and those of the output."""
    if sample.gradients is None:
        return ""
    difference = sample.gradients.difference
    differing = np.flatnonzero(difference > SAME_BITS)
    outputs = [i for i, name in enumerate(sample.names) if role_of(name) is ParameterRole.OUTPUT]
    if 2 * differing.size < len(sample.names) or any(
        not difference[i] > SAME_BITS for i in outputs
    ):
        return ""
    worst = int(np.argmax(difference))
    return (
        f"{differing.size} of {len(sample.names)} gradients are not (worst "
        f"{sample.names[worst]} by {difference[worst]:.2g})"
    )


def _own_mean(context: Context) -> float | None:
    """How far the reported loss is from the recomputed one, if by more than in the control.

    Root mean square over the steps: at a single step two means may agree by chance.
    """
    sizes = []
    for evidence in (context.compared.test, context.compared.control):
        compared = agreement(evidence, "loss")
        if compared is None or compared.steps.size < _FEWEST_STEPS:
            return None
        sizes.append(float(np.sqrt(np.mean(compared.difference**2))))
    ours, theirs = sizes
    return ours if ours > max(_OWN_ROUNDING, BEYOND * theirs) else None


@signature(Basis.FIRST_CURVES, Stage.FORWARD)
def objective(context: Context) -> Cause | None:
    """C4: the loss of the first step differs, before any update."""
    loss = context.curve("loss")
    if loss is None or not off_at_first_step(loss):
        return None
    proven = context.outcome("same-data") is Outcome.PASS
    on = "on the same samples and weights" if proven else "before any update"
    named = context.named(loss)
    equals = f", which equals {named.text}" if named.text else ""
    of_test, of_control = distinct_digits(float(loss.test[0]), float(loss.control[0]))
    sentence = (
        f"the forward pass or the objective differs: {signal_name(loss)} {of_test} "
        f"(control: {of_control}) at step {loss.steps[0]} {on} (relative {loss.difference[0]:.2g}"
        f"{equals}){_gradients_with_it(context, loss)}{_only_addition(context)}"
        f"{_unseen_masks(context)}"
    )
    if named.text:
        return Cause(sentence, CauseClass.OBJECTIVE, _MEAN)
    reported = loss.signal == "loss"
    place = None if reported else spot(context.sample(int(loss.steps[0])))
    return Cause(sentence, CauseClass.OBJECTIVE, look_in_forward(context, place, reported=reported))


def _unseen_masks(context: Context) -> str:
    """A clause if both runs draw, and it is not known whether they drop the same units."""
    test, control = context.compared.test, context.compared.control
    if not (drawing(test) and drawing(control)) or (masks_by_step(test) and masks_by_step(control)):
        return ""
    return "; both draw random numbers, and other masks of dropout, not seen, would look the same"


_MEAN = "how the loss is normalised: over which tokens, microbatches and ranks it is averaged"


def _gradients_with_it(context: Context, loss: Envelope) -> str:
    """What the gradients of the first step show about a loss that differs."""
    sample = context.sample(int(loss.steps[0]))
    wrong = wrong_gradients(sample)
    if wrong is None:
        known = sample is not None and sample.gradients is not None
        inside = "; every gradient is inside its limit at that step" if known else ""
        return inside + _directions_later(context, already=0)
    sorting = wrong.sorting
    if sorting.factor_of_all is not None:
        factor = sorting.factor_of_all.factor
        ratio = float(loss.test[0] / loss.control[0]) if loss.control[0] else 0.0
        alike = "too" if abs(factor - ratio) < FIRST_STEP_MATCH * abs(ratio) else "not by as much"
        return f"; all gradients are {factor:.4g} times the control's, {alike}"
    worst = f", worst {worst_tensors(wrong)}" if sorting.turned else ""
    off = f"; {len(sorting.off)} of {len(sorting.judged)} gradients are off{worst}"
    return off + _directions_later(context, already=len(sorting.turned))


def _directions_later(context: Context, already: int) -> str:
    """The sample at which most gradients have a wrong direction, if it is not the first."""
    later = [
        found
        for sample in context.compared.tensors
        if (found := wrong_gradients(sample)) and len(found.sorting.turned) > already
    ]
    if not later:
        return ""
    most = max(later, key=lambda found: len(found.sorting.turned))
    count = f"{len(most.sorting.turned)} of {len(most.sorting.judged)} gradients"
    return f"; by step {most.step} the direction of {count} is wrong, worst {worst_tensors(most)}"
