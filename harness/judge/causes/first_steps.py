"""C1, C2 and C4 from the curves' first step, where there are no sketches to look into."""

from __future__ import annotations

import numpy as np

from harness.judge.agreement import agreement
from harness.judge.apart import apart
from harness.judge.causes.cause import Cause
from harness.judge.causes.families import differences
from harness.judge.causes.groups import joined
from harness.judge.causes.wrong import Wrong, worst_words, wrong_gradients
from harness.judge.envelope import Envelope
from harness.judge.factors import FIRST_STEP_MATCH
from harness.judge.scene import (
    Scene,
    is_constant,
    loss_agrees,
    off_at_first_step,
    ratio_words,
    words_of,
)
from harness.model import CauseClass, Outcome, Precision

_SCALING = (
    "where gradients are divided: loss scaling by valid tokens, gradient_divide_factor of FSDP, "
    "DDP's averaging"
)


def gradients_scaled(scene: Scene) -> Cause | None:
    """C1: right forward pass, gradients off by a factor."""
    norm = _gradient_alone_off(scene)
    if norm is None:
        return None
    named = scene.named(norm)
    if not named.words and not is_constant(scene.ratio(norm)[0]):
        return None
    known = (
        f", which equals {named.words}"
        if named.words
        else ", the same at every step, which equals no degree or count of this run"
    )
    sentence = (
        f"gradients are scaled by {ratio_words(norm, 0)}{known}: {words_of(norm)} "
        f"{norm.test[0]:.4g} for {norm.control[0]:.4g} at step {norm.steps[0]}"
        f"{loss_agrees(scene, int(norm.steps[0]))}"
    )
    look_at = f"{named.where}; {_SCALING}" if named.where else _SCALING
    return Cause(sentence, CauseClass.GRADIENT_SCALE, look_at)


def gradient_direction(scene: Scene) -> Cause | None:
    """C2: right forward pass, gradients wrong by no single factor."""
    norm = _gradient_alone_off(scene)
    if norm is None:
        return None
    step = int(norm.steps[0])
    sample = scene.sample(step)
    alone = ""
    if sample is not None and sample.gradients is not None:
        worst = sample.gradients.worst
        alone = (
            "; though each by itself is inside its limit (nearest "
            f"{sample.names[worst]}, {sample.gradients.difference[worst]:.2g})"
        )
    sentence = (
        f"the backward pass differs: {words_of(norm)} is off by {norm.difference[0]:.2g} at step "
        f"{step} by no single factor{loss_agrees(scene, step)}: some gradients are "
        f"wrong, partly reduced, or scaled for a group of parameters only{alone}"
    )
    look_at = (
        "gradients per parameter, which this evidence does not have: reductions over each mesh "
        "dimension, and the backward of what the test set adds"
    )
    return Cause(sentence, CauseClass.GRADIENT_DIRECTION, look_at)


def objective(scene: Scene) -> Cause | None:
    """C4: the loss of the first step differs, before any update."""
    loss = scene.curve("loss")
    if loss is None or not off_at_first_step(loss):
        return None
    proven = scene.outcome("same-data") is Outcome.PASS
    on = "on the same samples and weights" if proven else "before any update"
    named = scene.named(loss)
    equals = f", which equals {named.words}" if named.words else ""
    of_test, of_control = apart(float(loss.test[0]), float(loss.control[0]))
    sentence = (
        f"the forward pass or the objective differs: {words_of(loss)} {of_test} for "
        f"{of_control} at step {loss.steps[0]} {on} (relative {loss.difference[0]:.2g}"
        f"{equals}){_gradients_with_it(scene, loss)}"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _forward(scene, scaled=bool(named.words)))


def trained_objective(scene: Scene) -> Cause | None:
    """C4: the trainer's own loss differs and the gradients with it; cross entropy alone agrees.

    What is minimised is another mean of the same logits (per rank, per microbatch), or has a term
    that the probe does not recompute (label smoothing).
    """
    wrong = _all_turned_at_first(scene)
    loss = scene.case.envelopes.get("loss")
    if wrong is None or loss is None:
        return None
    own = _own_mean(scene)
    if off_at_first_step(loss):
        seen = (
            f"the trainer's loss is {loss.test[0]:.8g} for {loss.control[0]:.8g} at step "
            f"{loss.steps[0]} (relative {loss.difference[0]:.2g})"
        )
    elif own is not None:
        seen = (
            f"the loss that the trainer minimises is not the mean cross entropy (they differ by "
            f"{own:.1g} over the steps, in the control they do not)"
        )
    else:
        return None
    sentence = (
        f"the objective differs: {seen} and all {len(wrong.off)} gradients follow it at step "
        f"{wrong.step}, worst {worst_words(wrong)}, while the cross entropy of the same logits "
        "agrees: tokens, microbatches or ranks have other weights in the mean, or what is added "
        "to it differs"
    )
    look_at = f"{_forward(scene, scaled=True)}; {_forward(scene, scaled=False)}"
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)


_FORWARD_ROUNDING = 1e-8
"""Of the recomputed loss in float32 at step 1: an ulp on every weight moves it by 4e-9, another
sharding by 3e-10 (as measured for judge/floors.py). No limit is that low, for larger models; but
gradients that are all off say that it is no rounding."""
_BEYOND = 3.0
"""Times the repeats' spread."""


def slight_forward(scene: Scene) -> Cause | None:
    """C4: the forward pass differs by less than the limit of the loss, the gradients by more.

    At random initial weights a loss hardly depends on what attention does. A backward pass that is
    wrong alone leaves the loss of the first step as it is.
    """
    loss, wrong = scene.case.envelopes.get("loss_recomputed"), _all_turned_at_first(scene)
    if loss is None or wrong is None or scene.precision is not Precision.FP32:
        return None
    calibration = scene.case.calibration
    learnt = calibration.signals.get(loss.signal) if calibration else None
    spread = float(learnt.scale[0]) if learnt is not None else 0.0
    if not loss.difference[0] > max(_FORWARD_ROUNDING, _BEYOND * spread):
        return None
    sentence = (
        f"the forward pass differs by little: all {len(wrong.off)} gradients are off at step "
        f"{wrong.step}, worst {worst_words(wrong)}, and {words_of(loss)} by "
        f"{loss.difference[0]:.2g}, which is inside its limit and more than rounding: at initial "
        "weights a loss hardly depends on some parts of a model, attention above all"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _forward(scene, scaled=False))


def _all_turned_at_first(scene: Scene) -> Wrong | None:
    """Gradients that are all off at the first step, by no single factor; the loss agrees."""
    plain = scene.case.envelopes.get("loss_recomputed")
    if plain is None or off_at_first_step(plain) or scene.failed("same-initial-parameters"):
        return None
    wrong = wrong_gradients(scene.sample(int(plain.steps[0])))
    if wrong is None or len(wrong.off) < len(wrong.among) or wrong.sorting.gone:
        return None
    return wrong if wrong.sorting.factor_of_all is None else None


_FEWEST_STEPS = 3
_OWN_ROUNDING = 5e-7
"""A few ulps of float32: what a reported loss may be off its recomputed value by rounding."""


def _own_mean(scene: Scene) -> float | None:
    """How far the reported loss is from the recomputed one, if by more than in the control.

    Root mean square over the steps: at a single step two means may agree by chance.
    """
    apart = []
    for evidence in (scene.case.test, scene.case.control):
        compared = agreement(evidence, "loss")
        if compared is None or compared.steps.size < _FEWEST_STEPS:
            return None
        apart.append(float(np.sqrt(np.mean(compared.difference**2))))
    ours, theirs = apart
    return ours if ours > max(_OWN_ROUNDING, _BEYOND * theirs) else None


def _gradient_alone_off(scene: Scene) -> Envelope | None:
    """The grad norm, if at the first step it is off while the loss agrees."""
    loss, norm = scene.curve("loss"), scene.curve("grad_norm")
    if loss is None or norm is None or not off_at_first_step(norm) or off_at_first_step(loss):
        return None
    return norm


def _gradients_with_it(scene: Scene, loss: Envelope) -> str:
    """What the gradients of the first step say about a loss that differs."""
    sample = scene.sample(int(loss.steps[0]))
    wrong = wrong_gradients(sample)
    if wrong is None:
        known = sample is not None and sample.gradients is not None
        inside = "; every gradient is inside its limit at that step" if known else ""
        return inside + _directions_later(scene, already=0)
    sorting = wrong.sorting
    if sorting.factor_of_all is not None:
        factor = sorting.factor_of_all.factor
        ratio = float(loss.test[0] / loss.control[0]) if loss.control[0] else 0.0
        alike = "too" if abs(factor - ratio) < FIRST_STEP_MATCH * abs(ratio) else "not by as much"
        return f"; all gradients are {factor:.4g} times the control's, {alike}"
    worst = f", worst {worst_words(wrong)}" if sorting.turned else ""
    off = f"; {len(sorting.off)} of {len(sorting.judged)} gradients are off{worst}"
    return off + _directions_later(scene, already=len(sorting.turned))


def _directions_later(scene: Scene, already: int) -> str:
    """The sample at which most gradients point elsewhere, if it is not the first."""
    later = [
        found
        for sample in scene.case.tensors
        if (found := wrong_gradients(sample)) and len(found.sorting.turned) > already
    ]
    if not later:
        return ""
    most = max(later, key=lambda found: len(found.sorting.turned))
    count = f"{len(most.sorting.turned)} of {len(most.sorting.judged)} gradients"
    return f"; by step {most.step} the direction of {count} is wrong, worst {worst_words(most)}"


def _forward(scene: Scene, *, scaled: bool) -> str:
    """What a person should open first, by what the test set adds to its control."""
    if scaled:
        return (
            "how the loss is normalised: over which tokens, microbatches and ranks it is averaged"
        )
    news = differences(scene)
    kinds = {word.split(" ")[0] for word in news}
    places = [
        words
        for name, words in (
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
        if name in kinds
    ]
    first = (
        f"what {joined(news)} changes in the forward pass: {'; '.join(places)}; then "
        if places
        else ""
    )
    return (
        f"{first}how the loss is averaged over valid tokens of ranks and microbatches, positions "
        "and masks, casts, and the random numbers of dropout on each rank"
    )
