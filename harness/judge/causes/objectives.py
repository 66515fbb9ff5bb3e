"""C4: what is minimised is the right cross entropy times a factor."""

from __future__ import annotations

from harness.judge.causes.cause import Cause
from harness.judge.causes.gradients import name_of
from harness.judge.causes.wrong import wrong_gradients
from harness.judge.scene import Scene, off_at_first_step, ratio_words
from harness.model import CauseClass

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
