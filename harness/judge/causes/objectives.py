"""C4: what is minimised is not the mean cross entropy of the logits, or another mean of it."""

from __future__ import annotations

import numpy as np

from harness.judge.agreement import agreement
from harness.judge.causes.cause import Cause
from harness.judge.causes.forward import BEYOND, SAME_BITS, same_program
from harness.judge.causes.gradients import name_of
from harness.judge.causes.groups import Role, role_of
from harness.judge.causes.wrong import Wrong, worst_words, wrong_gradients
from harness.judge.envelope import Envelope
from harness.judge.scene import Scene, off_at_first_step, ratio_words
from harness.judge.tensors import TensorComparison
from harness.model import CauseClass, Precision

_ALIKE = 0.1
"""Share of what a factor differs from 1 by, within which two factors are the same."""
_LOOK_AT = (
    "how the loss is normalised: by which count of tokens (padding, ignored labels), microbatches "
    "and ranks it is divided, and how often"
)


def scaled_objective(scene: Scene) -> Cause | None:
    """The trainer's own loss and every gradient are one multiple; cross entropy alone agrees.

    Gradients that are scaled after the backward pass leave the loss as it was, and a loss that is
    scaled for the log leaves the gradients.
    """
    loss, truth = (scene.case.envelopes.get(name) for name in ("loss", "loss_recomputed"))
    if loss is None or truth is None or not off_at_first_step(loss) or off_at_first_step(truth):
        return None
    step = int(loss.steps[0])
    wrong = wrong_gradients(scene.sample(step))
    scaled = wrong.sorting.factor_of_all if wrong is not None else None
    if scaled is None:
        return None
    ratio = float(loss.test[0] / loss.control[0]) if loss.control[0] else 0.0
    if abs(ratio - scaled.factor) > _ALIKE * abs(ratio - 1):
        return None
    named = name_of(scaled, step, scene)
    equals = f", which equals {named.words}" if named.words else ""
    sentence = (
        f"the objective is scaled: the trainer's loss and all {len(scaled.members)} gradients are "
        f"{ratio_words(loss, 0)} times the control's at step {step}{equals}, while the cross "
        "entropy of the same logits agrees: the loss is divided by another count, or weighted"
    )
    look_at = f"{named.where}; {_LOOK_AT}" if named.where else _LOOK_AT
    return Cause(sentence, CauseClass.OBJECTIVE, look_at)


_ADDED = "what is added to the loss (z-loss, label smoothing, auxiliary losses), and by how much"
_FEWEST_STEPS = 3
_OWN_ROUNDING = 5e-7
"""A few ulps of float32: what a reported loss may be off its recomputed value by rounding."""
_STEADY = 0.2
"""How much a term that is added may change from step to step, as a share of its own size."""
_LOST = 2.0**-8
"""Share of the cross entropy: rounding to bfloat16 loses no gradients of a larger term."""
_FAR = 3.0
"""Times its limit: below fp32 right implementations differ by more than few repeats teach."""
_AS_MUCH = 0.3
"""Share of what the loss is off by: another objective has other gradients by at least that."""


def trained_objective(scene: Scene) -> Cause | None:
    """The trainer's own loss differs and the gradients with it; cross entropy alone agrees.

    What is minimised is another mean of the same logits (per rank, per microbatch), or has a term
    that the probe does not recompute (label smoothing).
    """
    truth = scene.case.envelopes.get("loss_recomputed")
    if truth is None or off_at_first_step(truth) or scene.failed("same-initial-parameters"):
        return None
    seen = _another_loss(scene)
    follow = _gradients_follow(scene, truth) if seen else ""
    if not follow:
        return None
    sentence = (
        f"the objective differs: {seen} and {follow}, while the cross entropy of the same logits "
        "agrees: tokens, microbatches or ranks have other weights in the mean, or what is added "
        "to it differs"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, f"{_LOOK_AT}; {_ADDED}")


def added_term(scene: Scene) -> Cause | None:
    """The loss has a term beside the cross entropy, whose gradients are lost in low precision.

    A metric is wrong by a factor, by a delay, or up and down. A term that is added is always of one
    sign and changes as slowly as the model does.
    """
    loss = scene.case.envelopes.get("loss")
    off = (loss is not None and loss.onset is not None) or scene.failed(_MISREPORTED)
    own = _own_mean(scene)
    if scene.precision is Precision.FP32 or own is None or not off:
        return None
    compared = agreement(scene.case.test, "loss")
    if compared is None:
        return None
    added = compared.reported - compared.recomputed
    share = added / compared.recomputed
    size = float(np.median(np.abs(added)))
    steady = np.abs(np.diff(added)).max() <= _STEADY * size and np.all(added * added[0] > 0)
    fixed = np.ptp(share) <= _OWN_ROUNDING
    if not steady or fixed or np.abs(share).max() > _LOST:
        return None
    same = _all_the_same(scene)
    sentence = (
        f"the objective has another term: the loss that the trainer reports is the cross entropy "
        f"of its logits {'plus' if added[0] > 0 else 'minus'} {np.abs(added).min():.3g} to "
        f"{np.abs(added).max():.3g}, always of one sign and by no fixed factor, as a term that "
        f"is added to the objective is; gradients {same}, so it may be that only the log has it"
    )
    return Cause(sentence, CauseClass.OBJECTIVE, _ADDED)


_MISREPORTED = "reported-loss-is-recomputed"


def _all_the_same(scene: Scene) -> str:
    sample = next((each for each in scene.case.tensors if each.gradients is not None), None)
    furthest = float(sample.gradients.difference.max()) if sample and sample.gradients else 0.0
    if sample is not None and not furthest:
        return f"are the control's to the last bit, as {scene.precision.value} arithmetic rounds"
    return f"do not show it within the limits of {scene.precision.value} arithmetic"


def _another_loss(scene: Scene) -> str:
    """How the trainer's own loss shows that it is not the control's; empty when it does not."""
    loss, own = scene.case.envelopes.get("loss"), _own_mean(scene)
    if loss is not None and off_at_first_step(loss):
        return (
            f"the trainer's loss is {loss.test[0]:.8g} for {loss.control[0]:.8g} at step "
            f"{loss.steps[0]} (relative {loss.difference[0]:.2g})"
        )
    if own is None:
        return ""
    return (
        f"the loss that the trainer minimises is not the mean cross entropy (they differ by "
        f"{own:.1g} over the steps, in the control they do not)"
    )


def _gradients_follow(scene: Scene, truth: Envelope) -> str:
    """How gradients show that it is the objective and not the log; empty when they do not."""
    step = int(truth.steps[0])
    sample = scene.sample(step)
    wrong = wrong_gradients(sample)
    if wrong is not None and _as_an_objective(wrong, scene):
        count = f"all {len(wrong.off)}" if _all_off(wrong) else f"{len(wrong.off)}"
        worst = f", worst {worst_words(wrong)}" if wrong.sorting.turned else ""
        return f"{count} gradients follow it at step {step}{worst}"
    if sample is None or truth.difference[0] > SAME_BITS or not same_program(scene):
        return ""
    moved = _moved(sample)
    if not moved:
        return ""
    return (
        f"gradients follow it: the forward pass of step {step} is the same to the last bit, and "
        f"{moved}"
    )


def _as_an_objective(wrong: Wrong, scene: Scene) -> bool:
    """Whether gradients are off as those of another objective are: all, by no single factor.

    In low precision most may be inside their limits. The first that the backward pass comes to is
    not, by far, and by as much as the loss.
    """
    if wrong.sorting.gone or wrong.sorting.factor_of_all is not None:
        return False
    if scene.precision is Precision.FP32:
        return _all_off(wrong)
    first = [index for index in wrong.found.outside if role_of(wrong.names[index]) is Role.OUTPUT]
    loss = scene.case.envelopes.get("loss")
    apart = float(loss.difference[0]) if loss is not None else 0.0
    furthest = float(wrong.found.difference.max())
    far = _all_off(wrong) or bool((wrong.found.excess[first] > _FAR).any())
    return far and furthest > _AS_MUCH * apart


def _all_off(wrong: Wrong) -> bool:
    return len(wrong.off) == len(wrong.among)


def _moved(sample: TensorComparison) -> str:
    """Which gradients are not the control's bits, if most are, and those of the output."""
    if sample.gradients is None:
        return ""
    difference = sample.gradients.difference
    apart = np.flatnonzero(difference > SAME_BITS)
    outputs = [i for i, name in enumerate(sample.names) if role_of(name) is Role.OUTPUT]
    if 2 * apart.size < len(sample.names) or any(not difference[i] > SAME_BITS for i in outputs):
        return ""
    worst = int(np.argmax(difference))
    return (
        f"{apart.size} of {len(sample.names)} gradients are not (worst {sample.names[worst]} by "
        f"{difference[worst]:.2g})"
    )


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
    return ours if ours > max(_OWN_ROUNDING, BEYOND * theirs) else None
