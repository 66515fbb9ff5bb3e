"""C5: the number is wrong, and training is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.judge.agreement import agreement
from harness.judge.causes.cause import Cause
from harness.judge.causes.misreports import way_of
from harness.judge.scene import (
    Scene,
    is_constant,
    off_at_first_step,
    ratio_words,
    words_of,
)
from harness.model import CauseClass, Outcome, Precision

_LOGGED = {
    "loss": "where the loss is reduced for logging: dist_sum or dist_mean, over which mesh, and "
    "whether its placement is Partial",
    "grad_norm": "where the norm is computed for logging and clipping: over which mesh and "
    "pipeline stages it is summed",
}
_LOGGED_ELSEWHERE = {
    "loss": "where the loss is reduced for logging: over which ranks and microbatches it is added "
    "up, and by how many tokens or ranks it is divided",
    "grad_norm": "where the norm is computed for logging and clipping: over which ranks and shards "
    "it is summed",
}
"""The same where nobody knows the code."""
_TRAINED = (
    "same-initial-parameters",
    "renamed-parameters-agree",
    "gradients-first-steps",
    "updates-first-steps",
    "gradients-envelope",
    "updates-envelope",
    "clipping-first-steps",
    "clipping-envelope",
    "optimizer-steps",
    "optimizer-state-first-steps",
    "optimizer-state-envelope",
    "buffers-first-steps",
    "buffers-envelope",
)
"""Checks of what training really does, beside the recomputed curves."""
_TENSORS = {name for name in _TRAINED if name.startswith(("gradients-", "updates-"))}
_HARDLY = 8.0
"""Times its limit: a tensor further out is off, whatever the limit was learnt from. Right PP and
accumulation reach 6 in mixed bf16, where limits are learnt from moved weights alone."""
_CLEARLY = 0.3
"""Gradients agree in spite of a loss that differs when they do so by this share of it: another
objective has other gradients, whatever a coarse limit says."""
_MOSTLY = 0.5
"""Share of a reported difference that the recomputed values must not have, to be misreported."""


def metric_only(scene: Scene) -> Cause | None:
    """The reported number is wrong, the recomputed one right."""
    recomputed = [
        envelope
        for signal, envelope in scene.case.envelopes.items()
        if signal.endswith("_recomputed")
    ]
    if not recomputed:
        return None
    failed = [name for name in _TRAINED if scene.failed(name)]
    trained = not any(each.onset is not None for each in recomputed)
    trained = trained and (not failed or _hardly(failed, scene))
    for signal in ("loss", "grad_norm"):
        reported = scene.case.envelopes.get(signal)
        if reported is None or reported.onset is None:
            continue
        first = reported.index_of(reported.onset)
        if not _misreported(signal, scene, reported.onset):
            continue
        way = way_of(signal, scene)
        said = (
            f"only the metric is wrong: the reported {words_of(reported)} is "
            f"{ratio_words(reported, first)} times the control's at step {reported.steps[first]}"
            f"{way.words or scene.factor(reported)}, while the recomputed values agree"
        )
        look_at = "; ".join(words for words in (way.where, _logged(signal, scene)) if words)
        if trained:
            right = f"training itself is right{_unless(scene)}"
            if signal == "loss":
                right = _training(scene, abs(reported.test[first] / reported.control[first] - 1))
            sentence = f"{said}{_norm_too(signal, scene)}: {right}"
            return Cause(sentence, CauseClass.METRIC_ONLY, look_at)
        parted = _clipped(scene, reported.onset) if signal == "grad_norm" else None
        if parted is not None:
            sentence = (
                f"{said} there: a wrong norm, and clipping uses it, so training follows "
                f"(off from step {parted} on)"
            )
            return Cause(sentence, CauseClass.METRIC_ONLY, look_at)
    return None


def _hardly(failed: Sequence[str], scene: Scene) -> bool:
    """Whether tensors are all that failed, and below fp32 just outside their limits.

    Right implementations differ there by more than few repeats of the control. What a run reports
    and what it computes is compared within that run.
    """
    if scene.precision is Precision.FP32 or not set(failed) <= _TENSORS:
        return False
    kinds = (kind for each in scene.case.tensors for kind in (each.gradients, each.updates))
    furthest = max((float(kind.excess.max()) for kind in kinds if kind is not None), default=0.0)
    return furthest <= _HARDLY


def _training(scene: Scene, apart: float) -> str:
    """What is known of training when the reported loss is off by a share.

    An objective that differs by so much changes gradients by as much. In low precision that may be
    inside their limits.
    """
    sample = next((each for each in scene.case.tensors if each.gradients is not None), None)
    if scene.precision is Precision.FP32 or sample is None or sample.gradients is None:
        return "training itself is right"
    furthest = float(sample.gradients.difference.max(initial=0.0))
    if furthest <= _CLEARLY * apart:
        return "training itself is right"
    return (
        f"training agrees as far as {scene.precision.value} arithmetic shows (gradients to "
        f"{furthest:.1g}), which would not show an objective that is off by as much; the same pair "
        "in fp32 would"
    )


def _logged(signal: str, scene: Scene) -> str:
    """Where to look for what reports a signal."""
    spec = scene.case.spec
    guided = spec is not None and spec.trainer.can.guided
    return (_LOGGED if guided else _LOGGED_ELSEWHERE)[signal]


def _misreported(signal: str, scene: Scene, step: int) -> bool:
    """Whether most of a difference is between what one run reports and what is true of it.

    A recomputed value inside a coarse limit may be off by as much as the reported one.
    """
    reported, truth = (scene.case.envelopes.get(name) for name in (signal, f"{signal}_recomputed"))
    if reported is None or truth is None or step not in truth.steps:
        return True  # nothing speaks against it
    said, true = reported.index_of(step), truth.index_of(step)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = reported.test[said] / reported.control[said]
        own = truth.test[true] / truth.control[true]
        return bool(not abs(whole / own - 1) < _MOSTLY * abs(whole - 1))


def _unless(scene: Scene) -> str:
    """What is known of the norm that clipping used."""
    if scene.outcome("clipping-first-steps") is Outcome.PASS:
        return ", clipping too"
    return ", unless clipping uses that norm"


def _norm_too(signal: str, scene: Scene) -> str:
    """Whether the other metric is wrong as well."""
    norm = scene.case.envelopes.get("grad_norm")
    if signal == "grad_norm" or norm is None or norm.onset is None:
        return ""
    return f"; the reported grad norm is wrong, too{way_of('grad_norm', scene).words}"


def _clipped(scene: Scene, onset: int) -> int | None:
    """When training parted, if it did so only after a first step whose norm was misreported."""
    norm, sample = scene.case.envelopes.get("grad_norm_recomputed"), scene.sample(onset)
    if norm is None or not scene.agrees("grad_norm", onset) or scene.agrees("loss", onset) is False:
        return None
    if sample is not None and sample.gradients is not None and sample.gradients.outside.size:
        return None
    if not scene.failed("reported-grad-norm-is-recomputed"):
        return None
    parted = scene.first_failure(
        "grad-norm-first-step", "grad-norm-envelope", "reported-grad-norm-is-recomputed"
    )
    return parted if parted is not None and parted >= onset else None


def loss_of_right_gradients(scene: Scene) -> Cause | None:
    """A loss that differs although every gradient of it agrees."""
    loss, sample = scene.curve("loss"), scene.sample(1)
    if loss is None or not off_at_first_step(loss) or int(loss.steps[0]) != 1:
        return None
    if sample is None or sample.gradients is None or sample.gradients.outside.size:
        return None
    if scene.agrees("grad_norm", 1) is False or scene.failed("same-initial-parameters"):
        return None
    worst = sample.gradients.worst
    if not sample.gradients.difference[worst] <= _CLEARLY * loss.difference[0]:
        return None
    sentence = (
        f"only the loss as a number is wrong: {words_of(loss)} is {ratio_words(loss, 0)} times the "
        f"control's at step 1{scene.factor(loss)}, while the gradients of all "
        f"{len(sample.names)} parameters agree (the furthest to "
        f"{sample.gradients.difference[worst]:.1g})"
    )
    return Cause(sentence, CauseClass.METRIC_ONLY, _logged("loss", scene))


def loss_scaled_alone(scene: Scene) -> Cause | None:
    """C5 without a probe: a scaled objective would scale the gradients too."""
    loss, norm = scene.case.envelopes.get("loss"), scene.curve("grad_norm")
    if (
        "loss_recomputed" in scene.case.envelopes
        or loss is None
        or norm is None
        or norm.onset is not None
    ):
        return None
    factor = scene.factor(loss) if loss.onset is not None else ""
    constant = loss.onset is not None and is_constant(scene.ratio(loss)[0])
    if not (factor or constant):
        return None
    sentence = (
        f"probably only the metric is wrong: the loss is {ratio_words(loss, 0)} times the control's"
        f"{factor}, while the grad norm agrees at every step"
    )
    return Cause(sentence, CauseClass.METRIC_ONLY, _logged("loss", scene))


def contradiction(scene: Scene) -> Cause | None:
    """All agrees with the control but what the run says of itself."""
    for signal in ("loss", "grad_norm"):
        name = f"reported-{signal.replace('_', '-')}-is-recomputed"
        others = [
            check.name
            for check in scene.checks.values()
            if check.name != name and check.outcome is Outcome.FAIL
        ]
        if scene.failed(name) and not others:
            sentence = (
                f"only the metric is wrong: the {signal.replace('_', ' ')} that is "
                f"{scene.detail(name)}{way_of(signal, scene).words}, while all that was compared "
                "with the control agrees"
            )
            if signal == "loss" and (compared := agreement(scene.case.test, signal)) is not None:
                apart = float(compared.difference.max(initial=0.0))
                sentence += f": {_training(scene, apart)}"
            return Cause(sentence, CauseClass.METRIC_ONLY, _logged(signal, scene))
    return None
