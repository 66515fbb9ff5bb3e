"""C1, C2 and C4 from the curves' first step, where there are no sketches to look into."""

from __future__ import annotations

from harness.judge.causes.context import (
    Context,
    is_constant,
    loss_agrees,
    off_at_first_step,
    ratio_words,
    words_of,
)
from harness.judge.causes.factors import FIRST_STEP_MATCH
from harness.judge.causes.forward import look_in_forward
from harness.judge.causes.gradient_patterns import worst_words, wrong_gradients
from harness.judge.causes.location import spot
from harness.judge.causes.signature import Cause
from harness.judge.compare.envelopes import Envelope
from harness.judge.wording import distinct_digits
from harness.model import CauseClass, Outcome

_SCALING = (
    "where gradients are divided: loss scaling by valid tokens, gradient_divide_factor of FSDP, "
    "DDP's averaging"
)


def gradients_scaled(context: Context) -> Cause | None:
    """C1: right forward pass, gradients off by a factor."""
    found = _norm_scaled(context)
    if found is None:
        return None
    factor, numbers, where = found
    look_at = f"{where}; {_SCALING}" if where else _SCALING
    return Cause(f"gradients are scaled by {factor}{numbers}", CauseClass.GRADIENT_SCALE, look_at)


def norm_scaled(context: Context) -> Cause | None:
    """The same of curves alone, which do not tell gradients from what was logged of them."""
    found = _norm_scaled(context)
    if found is None:
        return None
    factor, numbers, where = found
    sentence = (
        f"the grad norm is off by a factor of {factor}{numbers}; whether gradients are, or only "
        "what was logged of them, curves do not tell"
    )
    look_at = f"what norm each run logs (before or after clipping); {where or _SCALING}"
    return Cause(sentence, CauseClass.UNKNOWN, look_at)


def _norm_scaled(context: Context) -> tuple[str, str, str] | None:
    """The factor of a norm that alone is off, the numbers behind it, and where it may arise."""
    norm = _gradient_alone_off(context)
    if norm is None:
        return None
    named = context.named(norm)
    if not named.words and not is_constant(context.ratio(norm)[0]):
        return None
    known = (
        f", which equals {named.words}"
        if named.words
        else ", the same at every step, which equals no degree or count of this run"
    )
    numbers = (
        f"{known}: {words_of(norm)} "
        f"{norm.test[0]:.4g} for {norm.control[0]:.4g} at step {norm.steps[0]}"
        f"{loss_agrees(context, int(norm.steps[0]))}"
    )
    return ratio_words(norm, 0), numbers, named.where


def gradient_direction(context: Context) -> Cause | None:
    """C2: right forward pass, gradients wrong by no single factor."""
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
        f"the backward pass differs: {words_of(norm)} is off by {norm.difference[0]:.2g} at step "
        f"{step} by no single factor{loss_agrees(context, step)}: some gradients are "
        f"wrong, partly reduced, or scaled for a group of parameters only{alone}"
    )
    look_at = (
        "gradients per parameter, which this evidence does not have: reductions over each mesh "
        "dimension, and the backward of what the test set adds"
    )
    return Cause(sentence, CauseClass.GRADIENT_DIRECTION, look_at)


def objective(context: Context) -> Cause | None:
    """C4: the loss of the first step differs, before any update."""
    loss = context.curve("loss")
    if loss is None or not off_at_first_step(loss):
        return None
    proven = context.outcome("same-data") is Outcome.PASS
    on = "on the same samples and weights" if proven else "before any update"
    named = context.named(loss)
    equals = f", which equals {named.words}" if named.words else ""
    of_test, of_control = distinct_digits(float(loss.test[0]), float(loss.control[0]))
    sentence = (
        f"the forward pass or the objective differs: {words_of(loss)} {of_test} for "
        f"{of_control} at step {loss.steps[0]} {on} (relative {loss.difference[0]:.2g}"
        f"{equals}){_gradients_with_it(context, loss)}"
    )
    if named.words:
        return Cause(sentence, CauseClass.OBJECTIVE, _MEAN)
    reported = loss.signal == "loss"
    place = None if reported else spot(context.sample(int(loss.steps[0])))
    return Cause(sentence, CauseClass.OBJECTIVE, look_in_forward(context, place, reported=reported))


_MEAN = "how the loss is normalised: over which tokens, microbatches and ranks it is averaged"


def _gradient_alone_off(context: Context) -> Envelope | None:
    """The grad norm, if at the first step it is off while the loss agrees."""
    loss, norm = context.curve("loss"), context.curve("grad_norm")
    if loss is None or norm is None or not off_at_first_step(norm) or off_at_first_step(loss):
        return None
    return norm


def _gradients_with_it(context: Context, loss: Envelope) -> str:
    """What the gradients of the first step say about a loss that differs."""
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
    worst = f", worst {worst_words(wrong)}" if sorting.turned else ""
    off = f"; {len(sorting.off)} of {len(sorting.judged)} gradients are off{worst}"
    return off + _directions_later(context, already=len(sorting.turned))


def _directions_later(context: Context, already: int) -> str:
    """The sample at which most gradients point elsewhere, if it is not the first."""
    later = [
        found
        for sample in context.compared.tensors
        if (found := wrong_gradients(sample)) and len(found.sorting.turned) > already
    ]
    if not later:
        return ""
    most = max(later, key=lambda found: len(found.sorting.turned))
    count = f"{len(most.sorting.turned)} of {len(most.sorting.judged)} gradients"
    return f"; by step {most.step} the direction of {count} is wrong, worst {worst_words(most)}"
