"""Tier 1: from shared weights, the first step alone catches most bugs.

Before any update the two runs compute the same function of the same weights and samples, so only
rounding may differ: scaled gradients, wrong reductions and wrong objectives all show here.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.judge.agreement import agreement
from harness.judge.check import Finding, Question, check, invalid, passed, skipped
from harness.judge.curves import series
from harness.judge.envelope import Envelope
from harness.model import Evidence, Limit, Outcome, SetSpec, Tier

Envelopes = Mapping[str, Envelope]


@check(Tier.FIRST_STEP)
def loss_first_step(control: Evidence, envelopes: Envelopes) -> Finding:
    """The loss of the first step agrees with the control's.

    The forward pass or the objective differs: nothing was updated yet.
    """
    return _first_step("loss", control, envelopes)


@check(Tier.FIRST_STEP)
def grad_norm_first_step(control: Evidence, envelopes: Envelopes) -> Finding:
    """The grad norm of the first step agrees with the control's.

    Gradients are scaled, incomplete or wrong, or their norm is measured wrongly. Under AdamW the
    loss hides a wrong scale: it is the ratio of gradients that moves the weights.
    """
    return _first_step("grad_norm", control, envelopes)


@check(Tier.FIRST_STEP)
def loss_recomputed_first_step(control: Evidence, envelopes: Envelopes) -> Finding:
    """The recomputed loss of the first step agrees with the control's.

    The forward pass or the objective itself differs, whatever the trainer reports.
    """
    return _first_step("loss_recomputed", control, envelopes)


@check(Tier.FIRST_STEP)
def grad_norm_recomputed_first_step(control: Evidence, envelopes: Envelopes) -> Finding:
    """The recomputed grad norm of the first step agrees with the control's.

    The gradients themselves differ, whatever norm the trainer reports.
    """
    return _first_step("grad_norm_recomputed", control, envelopes)


@check(Tier.FIRST_STEP)
def reported_loss_is_recomputed(test: Evidence) -> Finding:
    """The loss that the run reports is the one that its probe recomputes.

    Only the metric is wrong: training may be right and its curve is not.
    """
    return _reported(test, "loss")


@check(Tier.FIRST_STEP)
def reported_grad_norm_is_recomputed(test: Evidence) -> Finding:
    """The grad norm that the run reports is the one that its probe recomputes.

    Only the metric is wrong; but clipping uses it, so training may follow.
    """
    return _reported(test, "grad_norm")


@check(Tier.FIRST_STEP)
def gradients_present(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Every parameter that gets a gradient in the control gets one in the run.

    A parameter without gradient stays as it was initialised; the loss hardly shows it.
    """
    ours, theirs = series(test, "grads_missing"), series(control, "grads_missing")
    if not ours or not theirs:
        detail = "the source does not tell which parameters got a gradient"
        return skipped(detail) if spec is None else invalid(detail)
    more = [step for step, count in ours.items() if not count <= theirs.get(step, 0)]
    names = [name for name in test.grads_missing if name not in control.grads_missing]
    if not more and not names:
        untold = sorted(({*test.steps} & {*control.steps}) - ({*ours} & {*theirs}))
        if untold and spec is not None:
            return invalid(f"nothing tells at step {untold[0]} who got a gradient", untold[0])
        return passed()
    onset = min(more, default=None)
    count = ours[onset] if onset is not None else float(len(names))
    which = ", ".join(names) or f"{count:g} parameters"
    when = f" at step {onset}" if onset is not None else ""
    return Finding(
        Outcome.FAIL,
        f"no gradient for {which}{when}",
        measured=count,
        limit=Limit(theirs.get(onset or 0, 0.0), "as many as in the control"),
        unit="parameters",
        onset=onset,
    )


CHECKS: tuple[Question, ...] = (
    loss_first_step,
    grad_norm_first_step,
    loss_recomputed_first_step,
    grad_norm_recomputed_first_step,
    reported_loss_is_recomputed,
    reported_grad_norm_is_recomputed,
    gradients_present,
)


def _first_step(signal: str, control: Evidence, envelopes: Envelopes) -> Finding:
    """The envelope's first entry, which has to be the control's first step."""
    envelope = envelopes.get(signal)
    if envelope is None:
        return skipped(f"no {signal} on one side")
    step = envelope.steps[0]
    if step != control.steps[0]:
        return invalid(f"no {signal} at the control's first step, {control.steps[0]}", step)
    difference, limit = envelope.difference[0], envelope.limit_at(0)
    outside = not difference <= limit.value
    return Finding(
        Outcome.FAIL if outside else Outcome.PASS,
        f"{envelope.test[0]:.8g} for {envelope.control[0]:.8g}",
        measured=difference,
        limit=limit,
        unit="relative",
        steps=(step, step),
        onset=step if outside else None,
    )


def _reported(test: Evidence, signal: str) -> Finding:
    compared = agreement(test, signal)
    if compared is None:
        return skipped(f"no recomputed {signal}")
    index, outside = compared.worst, compared.outside
    return Finding(
        Outcome.FAIL if outside else Outcome.PASS,
        f"reported {compared.reported[index]:.8g}, recomputed {compared.recomputed[index]:.8g} "
        f"at step {compared.steps[index]}",
        measured=compared.difference[index],
        limit=compared.limit,
        unit="relative",
        steps=(compared.steps[0], compared.steps[-1]),
        onset=outside[0] if outside else None,
    )
