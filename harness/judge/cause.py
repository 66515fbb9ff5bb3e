"""The likely cause of a failure: its signature against the known classes of silent bugs.

Classes and their signatures were collected from public issues of torchtitan, Megatron-LM,
DeepSpeed and PyTorch. A signature is a function of a :class:`Scene`; the first that recognises it
says so in one sentence with the numbers behind it. What nothing recognises is called unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from harness.judge.case import Case
from harness.judge.curves import series
from harness.judge.envelope import Envelope
from harness.judge.floors import coarser
from harness.judge.scene import Scene, is_constant, off_at_first_step, ratio_words, words_of
from harness.model import Check, Outcome, Precision

_DOUBTS = (
    "same-data",
    "same-tokens",
    "same-lr",
    "named-in-force",
    "nothing-unnamed",
    "config-differs-as-declared",
    "control-in-force",
)
"""Integrity checks that, when INVALID, may explain a difference by themselves."""


Signature = Callable[[Scene], str | None]


def likely_cause(case: Case, checks: Sequence[Check]) -> str:
    """One sentence on why a test set failed. ``checks`` hold at least one FAIL."""
    scene = Scene(case, {check.name: check for check in checks})
    sentence = next(found for signature in _SIGNATURES if (found := signature(scene)))
    doubts = [
        scene.detail(name)
        for name in _DOUBTS
        if scene.outcome(name) is Outcome.INVALID and scene.detail(name) not in sentence
    ]
    return sentence + (f"; mind that {doubts[0]}" if doubts else "")


def _not_finite(scene: Scene) -> str | None:
    """Training ended in NaN or infinity."""
    if scene.outcome("finite") is not Outcome.FAIL:
        return None
    step = scene.checks["finite"].onset or 0
    contradiction = _half_finite(scene, step)
    if contradiction:
        return (
            f"{scene.detail('finite')}, but {contradiction}: training may be right, and the "
            "metric or the probe is not"
        )
    earlier = [
        envelope
        for envelope in scene.case.envelopes.values()
        if envelope.onset is not None and envelope.onset < step
    ]
    detail = scene.detail("finite")
    if not earlier:
        return f"training blew up: {detail}"
    first = min(earlier, key=lambda envelope: envelope.onset or 0)
    return f"training blew up: {detail}; {words_of(first)} was already off at step {first.onset}"


def _other_input(scene: Scene) -> str | None:
    """C6: different samples, token counts or learning rates, before the curves parted."""
    onsets = [envelope.onset for envelope in scene.case.envelopes.values()]
    parted = [onset for onset in onsets if onset is not None]
    for name, words in (
        ("same-data", "data order"),
        ("ranks-see-same-batch", "data order"),
        ("same-tokens", "token budget"),
        ("same-lr", "learning-rate schedule"),
    ):
        onset = scene.checks[name].onset
        invalid = scene.outcome(name) is Outcome.INVALID
        if invalid and onset is not None and onset <= min(parted, default=onset):
            return f"{words}: {scene.detail(name)}, so the curves cannot agree"
    return None


def _no_gradient(scene: Scene) -> str | None:
    """C2: a parameter is not trained."""
    if scene.outcome("gradients-present") is not Outcome.FAIL:
        return None
    return f"{scene.detail('gradients-present')}: these parameters are not trained"


def _metric_only(scene: Scene) -> str | None:
    """C5: the reported number is wrong, the recomputed one right."""
    recomputed = [
        envelope
        for signal, envelope in scene.case.envelopes.items()
        if signal.endswith("_recomputed")
    ]
    if not recomputed or any(envelope.onset is not None for envelope in recomputed):
        return None
    for signal in ("loss", "grad_norm"):
        reported = scene.case.envelopes.get(signal)
        if reported is None or reported.onset is None:
            continue
        first = reported.index_of(reported.onset)
        return (
            f"only the metric is wrong: the reported {words_of(reported)} is "
            f"{ratio_words(reported, first)} times the control's at step {reported.steps[first]}"
            f"{scene.factor(reported)}, while the recomputed values agree: training itself is right"
            + (", unless clipping uses that norm" if signal == "grad_norm" else "")
        )
    return None


def _loss_scaled_alone(scene: Scene) -> str | None:
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
    return (
        f"probably only the metric is wrong: the loss is {ratio_words(loss, 0)} times the control's"
        f"{factor}, while the grad norm agrees at every step"
    )


def _gradients_scaled(scene: Scene) -> str | None:
    """C1: right forward pass, gradients off by a factor."""
    pair = _gradient_alone_off(scene)
    if pair is None:
        return None
    loss, norm = pair
    factor = scene.factor(norm)
    if not factor and not is_constant(scene.ratio(norm)[0]):
        return None
    known = factor or ", the same at every step, which equals no degree or count of this run"
    return (
        f"gradients are scaled by {ratio_words(norm, 0)}{known}: {words_of(norm)} "
        f"{norm.test[0]:.4g} for {norm.control[0]:.4g} at step {norm.steps[0]}, "
        f"while the loss {_agrees(loss)}"
    )


def _gradient_direction(scene: Scene) -> str | None:
    """C2: right forward pass, gradients wrong by no single factor."""
    pair = _gradient_alone_off(scene)
    if pair is None:
        return None
    loss, norm = pair
    return (
        f"the backward pass differs: {words_of(norm)} is off by {norm.difference[0]:.2g} at step "
        f"{norm.steps[0]} by no single factor, while the loss {_agrees(loss)}: some gradients are "
        "wrong, partly reduced, or scaled for a group of parameters only"
    )


def _objective(scene: Scene) -> str | None:
    """C4: the loss of the first step differs, before any update."""
    loss = scene.curve("loss")
    if loss is None or not off_at_first_step(loss):
        return None
    proven = scene.outcome("same-data") is Outcome.PASS
    on = "on the same samples and weights" if proven else "before any update"
    return (
        f"the forward pass or the objective differs: {words_of(loss)} {loss.test[0]:.6g} for "
        f"{loss.control[0]:.6g} at step {loss.steps[0]} {on} (relative {loss.difference[0]:.2g}"
        f"{scene.factor(loss)})"
    )


def _one_step(scene: Scene) -> str | None:
    """A glitch: one step is off, and training goes on as if nothing had been."""
    off = [envelope for envelope in scene.case.envelopes.values() if envelope.onset is not None]
    steps = {envelope.onset for envelope in off}
    if len(steps) != 1 or any(envelope.outside.size > 1 for envelope in off):
        return None
    step = off[0].onset or 0
    worst = max(off, key=lambda envelope: float(envelope.difference[envelope.index_of(step)]))
    index = worst.index_of(step)
    if index == worst.steps.size - 1:
        return None
    return (
        f"one step alone is off: {words_of(worst)} is {ratio_words(worst, index)} times the "
        f"control's at step {step}, and all others agree"
    )


def _later(scene: Scene) -> str | None:
    """C3, C6: the first step is right, the curves part later."""
    off = [envelope for envelope in scene.case.envelopes.values() if envelope.onset is not None]
    if not off:
        return None
    first = min(off, key=lambda envelope: envelope.onset or 0)
    onset = first.onset or 0
    index = first.index_of(onset)
    precision = coarser(scene.case.test.precision, scene.case.control.precision)
    if precision is not Precision.FP32:
        suspects = (
            f"before that, a difference may hide below the floor of {precision.value} arithmetic; "
            "the same pair in fp32 would show its first step"
        )
    elif index == 1:
        suspects = (
            "the first update differs: optimizer, replicas, or a gradient direction that norms hide"
        )
    else:
        suspects = "state that training carries along: optimizer, buffers, replicas, schedule, data"
    return (
        f"the runs agree until step {onset}, where {words_of(first)} is off by "
        f"{first.difference[index]:.2g}: {suspects}"
    )


def _unknown(scene: Scene) -> str:
    """No class fits: say what failed and nothing more."""
    failed = next(check for check in scene.checks.values() if check.outcome is Outcome.FAIL)
    return f"unknown: {failed.name} failed ({failed.detail})"


_SIGNATURES: tuple[Signature, ...] = (
    _not_finite,
    _other_input,
    _no_gradient,
    _metric_only,
    _loss_scaled_alone,
    _gradients_scaled,
    _gradient_direction,
    _objective,
    _one_step,
    _later,
    _unknown,
)
"""Most certain first: later ones only see what earlier ones did not recognise."""


def _half_finite(scene: Scene, step: int) -> str:
    """Which signal is finite as reported or as recomputed but not both, in words; else empty."""
    test, words = scene.case.test, ""
    for signal in ("loss", "grad_norm"):
        said = series(test, signal).at(step)
        found = series(test, f"{signal}_recomputed").at(step)
        reported = math.nan if said is None else said
        recomputed = reported if found is None else found
        if math.isfinite(reported) != math.isfinite(recomputed):
            words = words or f"reported {reported:.6g}, recomputed {recomputed:.6g}"
        elif not math.isfinite(reported):
            return ""  # non-finite either way: it is
    return words


def _gradient_alone_off(scene: Scene) -> tuple[Envelope, Envelope] | None:
    """Loss and grad norm, if at the first step the norm is off while the loss agrees."""
    loss, norm = scene.curve("loss"), scene.curve("grad_norm")
    if loss is None or norm is None or not off_at_first_step(norm) or off_at_first_step(loss):
        return None
    return loss, norm


def _agrees(loss: Envelope) -> str:
    difference = loss.difference[0]
    return f"agrees to {difference:.1g}" if difference else "is the same"
