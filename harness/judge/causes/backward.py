"""C1 and C2: correct forward pass, wrong gradients.

From sketches, tensor by tensor: scaled in all tensors, scaled in some, or wrong in direction.
Without sketches, from the grad norm of the first step.
"""

from __future__ import annotations

import numpy as np

from converge_harness.judge.causes.context import (
    ABRUPT,
    Context,
    digits,
    is_constant,
    is_one_factor,
    loss_agrees,
    off_at_first_step,
    ratio_text,
    signal_name,
)
from converge_harness.judge.causes.factors import Match, NamedFactor, named_factor
from converge_harness.judge.causes.gradient_patterns import (
    MOST_FACTORS,
    PART_LEAVES,
    Scaled,
    Wrong,
    common_multiple,
    displaced,
    rounding_clause,
    scaled_together,
    sort,
    worst_tensors,
    wrong_gradients,
)
from converge_harness.judge.causes.location import family, of_scores, scores_scaled, stage_clause
from converge_harness.judge.causes.parameter_names import describe
from converge_harness.judge.causes.signature import (
    EVERY,
    Basis,
    Cause,
    ComparisonKind,
    Stage,
    signature,
)
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.floors import FIRST_STEPS
from converge_harness.judge.compare.tensors import TensorComparison
from converge_harness.model import CauseClass

_LEAST_MATCH, _MOST_MATCH = 1e-3, 3e-2
_NOTHING = 1e-12
_HOLES = 0.1
"""Share of a tensor's entries that are zero in the test set only; from it on a cause says so."""
_BESIDE = 0.1
"""Share of a factor's difference from one: tensors that are off by less do not contradict it."""
_WHERE = "where gradients are divided: loss scaling by valid tokens, gradient_divide_factor of FSDP"


@signature(Basis.RECORDED, Stage.BACKWARD, asked_of=EVERY)
def no_gradient(context: Context) -> Cause | None:
    """C2: a parameter is not trained."""
    look_at = (
        "what cuts these parameters off from the loss: detach and no_grad, requires_grad lost in "
        "a wrapper or by the compiler, a pipeline stage that sends no gradient back"
    )
    onset, first = context.checks["gradients-present"].onset, context.first_failure()
    if context.failed("gradients-present") and (onset is None or onset == first):
        sentence = f"{context.detail('gradients-present')}: these parameters are not trained"
        return Cause(sentence, CauseClass.NO_GRADIENT, look_at)
    wrong = _first_wrong(context)
    if wrong is None or not wrong.sorting.gone or wrong.sorting.off != wrong.sorting.gone:
        return None
    sentence = (
        f"the gradient of {describe(wrong.off, wrong.among)} is all zeros at step {wrong.step}, "
        "and is not in the control: these parameters are not trained"
    )
    return Cause(sentence, CauseClass.NO_GRADIENT, look_at)


@signature(
    Basis.FIRST_TENSORS,
    Stage.BACKWARD,
    # A difference outside of wider limits is clearer than what frozen steps show.
    overrides=("beyond_rounding",),
)
def sampled_gradients(context: Context) -> Cause | None:
    """C1, C2: gradients of the first steps differ, and nothing else did so before."""
    wrong = _first_wrong(context)
    if wrong is None:
        return None
    return _kept(wrong, context.sample(wrong.step - 1)) or _said(wrong, context)


@signature(Basis.FIRST_TENSORS, Stage.BACKWARD)
def faintly_scaled(context: Context) -> Cause | None:
    """C1: all gradients are one multiple, each inside its own limit; only their norm is outside."""
    norm, loss = context.curve("grad_norm"), context.curve("loss")
    if norm is None or not off_at_first_step(norm) or loss is None or off_at_first_step(loss):
        return None
    sample = context.sample(int(norm.steps[0]))
    if sample is None or sample.gradients is None or sample.gradients.outside.size:
        return None
    ours, theirs = sample.test.gradients, sample.control.gradients
    if ours is None or theirs is None:
        return None
    sorting = sort(ours.sketch, theirs.sketch, sample.gradients)
    whole = scaled_together(ours.sketch, theirs.sketch, sorting.judged)
    sizes = sample.control.sizes
    wrong = Wrong(sample.step, sample.names, sizes, ours, theirs, sample.gradients, sorting)
    return _scaled(wrong, whole, context) if whole is not None else None


@signature(
    Basis.LATER_TENSORS,
    Stage.BACKWARD,
    # It only applies where no update was off before.
    overrides=(
        "moved_too_far",
        "forward_on_new_data",
    ),
)
def sampled_gradients_later(context: Context) -> Cause | None:
    """C1, C2, beginning later: a later sample is the first difference, and a large one."""
    for sample in context.compared.tensors:
        if sample.updates is not None and sample.updates.outside.size:
            return None
        wrong = wrong_gradients(sample)
        if wrong is None:
            continue
        if sample.step <= FIRST_STEPS:
            return None
        first, loss = context.first_failure(), context.agrees("loss", sample.step)
        far = wrong.found.difference[wrong.found.worst] / wrong.found.limit[wrong.found.worst]
        if first != sample.step or loss is False or not far > ABRUPT:
            return None
        cause = _said(wrong, context)
        return cause._replace(sentence=f"{cause.sentence}; the samples before agree")
    return None


def _said(wrong: Wrong, context: Context) -> Cause:
    if wrong.sorting.factor_of_all is not None:
        return _scaled(wrong, wrong.sorting.factor_of_all, context)
    if wrong.sorting.scaled and not wrong.sorting.gone and _nothing_beside(wrong):
        return _group_scaled(wrong, context)
    return _direction(wrong, context)


def _nothing_beside(wrong: Wrong) -> bool:
    """Whether few directions are wrong beside the scaled gradients: limits may be a bit too low."""
    scaled = min(abs(each.factor - 1) for each in wrong.sorting.scaled)
    turned = wrong.found.difference[list(wrong.sorting.turned)]
    return bool(turned.max(initial=0.0) <= _BESIDE * scaled)


def _first_wrong(context: Context) -> Wrong | None:
    """The first wrong sample, if it is of the first steps, and no loss or update is to blame.

    Later samples compare runs that differ since long before, for whatever reason.
    """
    moved = 0.0
    for sample in context.compared.tensors:
        if sample.step > FIRST_STEPS or context.agrees("loss", sample.step) is False:
            return None
        if sample.initial is not None and sample.initial.outside.size:
            return None
        wrong = wrong_gradients(sample)
        if wrong is not None:
            # An update that is off by as much, inside its wider limit, would explain it.
            explained = float(wrong.found.difference.max()) <= moved
            return wrong if not explained else None
        if sample.updates is not None and sample.updates.outside.size:
            return None
        if sample.updates is not None:
            moved = float(sample.updates.difference.max())
    return None


def name_of(scaled: Scaled, step: int, context: Context) -> NamedFactor:
    """What the factor of tensors equals: more exact than for curves, as far as rounding allows."""
    near = float(np.clip(3 * scaled.residual, _LEAST_MATCH, _MOST_MATCH))
    return named_factor(
        np.array([scaled.factor]),
        np.array([step], dtype=np.int64),
        context.compared.test,
        context.compared.control,
        Match(near, near),
    )


def _scaled(wrong: Wrong, scaled: Scaled, context: Context) -> Cause:
    named = name_of(scaled, wrong.step, context)
    known = f", which equals {named.text}" if named.text else _equals_nothing(scaled)
    sentence = (
        f"gradients are scaled by {digits(scaled.factor)}{known}: all {len(scaled.members)} "
        f"parameters alike at step {wrong.step} ({_rounding(scaled)})"
        f"{loss_agrees(context, wrong.step)}"
    )
    look_at = f"{named.where}; {_WHERE}" if named.where else f"{_WHERE}, DDP's averaging"
    return Cause(sentence, CauseClass.GRADIENT_SCALE, look_at)


def _equals_nothing(scaled: Scaled) -> str:
    if scaled.factor < 0:
        return " (they have the opposite sign)"
    return ", which equals no degree or count of this run"


def _rounding(scaled: Scaled) -> str:
    if scaled.residual < _NOTHING:
        return "the factor explains all of it"
    size = "rounding" if scaled.clean else "more than rounding, so something else is wrong as well"
    return f"the residual after this factor is at most {scaled.residual:.1g}, {size}"


def _group_scaled(wrong: Wrong, context: Context) -> Cause:
    sorting, among = wrong.sorting, wrong.among
    off = wrong.named(index for each in sorting.scaled for index in each.members)
    if len(sorting.scaled) == 1 and not sorting.turned and of_scores(off):
        (scaled,) = sorting.scaled
        if not name_of(scaled, wrong.step, context).text:
            where = f"at step {wrong.step} ({describe(off, among)}; {_rounding(scaled)})"
            return scores_scaled(scaled.factor, where)
    hint = family(off, among, context)
    where = ""
    if len(sorting.scaled) <= MOST_FACTORS:
        parts = []
        for scaled in sorting.scaled:
            named = name_of(scaled, wrong.step, context)
            where = where or named.where
            known = f", which equals {named.text}" if named.text else _equals_nothing(scaled)
            group = wrong.named(scaled.members)
            stage = stage_clause(group, among, context)
            parts.append(f"{describe(group, among)}{stage} by {digits(scaled.factor)}{known}")
        said = "; ".join(parts)
    else:
        factors = sorted(scaled.factor for scaled in sorting.scaled)
        said = (
            f"{describe(off, among)}, each by another factor from {factors[0]:.4g} to "
            f"{factors[-1]:.4g}"
        )
    rest = f"; the other {len(sorting.right)} are right" if sorting.right else ""
    if sorting.turned:
        rest += f"; {len(sorting.turned)} more are slightly off: {worst_tensors(wrong)}"
    clue = f"; {hint.text}" if hint.text and len(sorting.scaled) == 1 else ""
    worst = max(sorting.scaled, key=lambda scaled: scaled.residual)
    sentence = (
        f"gradients are scaled in {len(off)} of {len(among)} parameters at step "
        f"{wrong.step}: {said}{rest}{clue} ({_rounding(worst)}){loss_agrees(context, wrong.step)}"
    )
    look_at = "; ".join(text for text in (hint.look_at, where) if text)
    return Cause(sentence, CauseClass.GROUP_SCALE, look_at)


def _direction(wrong: Wrong, context: Context) -> Cause:
    sorting, among, names = wrong.sorting, wrong.among, wrong.off
    rest = f"; the other {len(sorting.right)} are right" if sorting.right else ""
    scaled = sum(len(each.members) for each in sorting.scaled)
    more = f", {scaled} more only in scale" if scaled else ""
    gone = f", {len(sorting.gone)} more are all zeros" if sorting.gone else ""
    which = f"; off: {describe(names, among)}" if len(names) < len(among) else ""
    hint = family(names, among, context)
    clue = f"; {hint.text}" if hint.text else ""
    sentence = (
        f"the backward pass differs: {len(sorting.turned)} of {len(among)} gradients are wrong in "
        f"direction at step {wrong.step}{more}{gone}{loss_agrees(context, wrong.step)}: worst "
        f"{worst_tensors(wrong)}{which}"
        f"{stage_clause(names, among, context)}{rest}{clue}{_moved(wrong)}{_holes(wrong)}"
        f"{rounding_clause(wrong, context)}"
    )
    return Cause(sentence, CauseClass.GRADIENT_DIRECTION, hint.look_at)


def _kept(wrong: Wrong, before: TensorComparison | None) -> Cause | None:
    """Gradients of the step before were added, because they were not set to zero."""
    if before is None or before.test.gradients is None:
        return None
    off = wrong.found.outside
    added = (wrong.test.sketch - wrong.control.sketch)[off]
    share = common_multiple(added, before.test.gradients.sketch[off])
    if share is None or not 0 < share < 1 + PART_LEAVES:
        return None
    clipped = f" ({share:.2g} of them: as clipping left them)" if share < 1 - PART_LEAVES else ""
    sentence = (
        f"gradients of step {before.step} are still there at step {wrong.step}: those of "
        f"{describe(wrong.named(off), wrong.among)} are the sum of both steps'{clipped}"
    )
    return Cause(sentence, CauseClass.STATE, "where gradients are set to zero: zero_grad")


def _moved(wrong: Wrong) -> str:
    norms = wrong.test.norm, wrong.control.norm
    difference = wrong.found.difference
    return displaced(wrong.names, wrong.sizes, norms, wrong.sorting.turned, difference)


def _holes(wrong: Wrong) -> str:
    """A clause on tensors of which a part gets no gradient."""
    more = (wrong.test.zeros - wrong.control.zeros) / np.maximum(wrong.sizes, 1)
    holes = [index for index in wrong.sorting.turned if more[index] > _HOLES]
    if not holes:
        return ""
    name, share = wrong.names[holes[0]], more[holes[0]]
    others = f" and parts of {len(holes) - 1} more" if len(holes) > 1 else ""
    return f"; {share:.0%} of {name}{others} get no gradient at all"


_SCALING = (
    "where gradients are divided: loss scaling by valid tokens, gradient_divide_factor of FSDP, "
    "DDP's averaging"
)


@signature(
    Basis.FIRST_CURVES,
    Stage.BACKWARD,
    # A factor says more than the absence of one.
    overrides=("gradient_direction",),
)
def gradients_scaled(context: Context) -> Cause | None:
    """C1: correct forward pass, gradients off by a factor."""
    found = _norm_scaled(context)
    if found is None:
        return None
    factor, numbers, where = found
    look_at = f"{where}; {_SCALING}" if where else _SCALING
    return Cause(f"gradients are scaled by {factor}{numbers}", CauseClass.GRADIENT_SCALE, look_at)


@signature(Basis.FIRST_CURVES, Stage.BACKWARD, asked_of=(ComparisonKind.CURVES,))
def norm_scaled(context: Context) -> Cause | None:
    """The same of curves alone, which cannot separate wrong gradients from a wrong log of them."""
    found = _norm_scaled(context)
    if found is None:
        return None
    factor, numbers, where = found
    sentence = (
        f"the grad norm is off by a factor of {factor}{numbers}; curves do not show whether "
        "gradients are, or only what was logged of them"
    )
    look_at = f"what norm each run logs (before or after clipping); {where or _SCALING}"
    return Cause(sentence, CauseClass.UNKNOWN, look_at)


def _norm_scaled(context: Context) -> tuple[str, str, str] | None:
    """The factor when only a norm is off, the numbers behind it, and where it may arise."""
    norm = _gradient_alone_off(context)
    if norm is None:
        return None
    named = context.named(norm)
    # Where there are tensors, a norm near the right one may be that of an incomplete gradient.
    same = is_one_factor if context.compared.curves_alone else is_constant
    if not named.text and not same(context.ratio(norm)[0]):
        return None
    known = (
        f", which equals {named.text}"
        if named.text
        else ", the same at every step"
        + ("" if context.compared.curves_alone else ", which equals no degree or count of this run")
    )
    numbers = (
        f"{known}: {signal_name(norm)} "
        f"{norm.test[0]:.4g} (control: {norm.control[0]:.4g}) at step {norm.steps[0]}"
        f"{loss_agrees(context, int(norm.steps[0]))}"
    )
    return ratio_text(norm, 0), numbers, named.where


@signature(
    Basis.FIRST_CURVES,
    Stage.BACKWARD,
    # Only asked where the loss agrees, which it does not when the objective differs.
    overrides=("objective",),
)
def gradient_direction(context: Context) -> Cause | None:
    """C2: correct forward pass, gradients wrong by no single factor."""
    norm = _gradient_alone_off(context)
    if norm is None:
        return None
    step = int(norm.steps[0])
    sample = context.sample(step)
    alone = ""
    if sample is not None and sample.gradients is not None:
        worst = sample.gradients.worst
        alone = (
            "; though each by itself is inside its limit (nearest "
            f"{sample.names[worst]}, {sample.gradients.difference[worst]:.2g})"
        )
    sentence = (
        f"the backward pass differs: {signal_name(norm)} is off by {norm.difference[0]:.2g} at "
        f"step {step}, not by one factor{loss_agrees(context, step)}: some gradients are "
        f"wrong, partly reduced, or scaled for a group of parameters only{alone}"
    )
    look_at = (
        "gradients per parameter, which this evidence does not have: reductions over each mesh "
        "dimension, and the backward of what the test set adds"
    )
    return Cause(sentence, CauseClass.GRADIENT_DIRECTION, look_at)


def _gradient_alone_off(context: Context) -> Envelope | None:
    """The grad norm, if at the first step it is off while the loss agrees."""
    loss, norm = context.curve("loss"), context.curve("grad_norm")
    if loss is None or norm is None or not off_at_first_step(norm) or off_at_first_step(loss):
        return None
    return norm
