"""Tier 1: from shared weights, the first step alone catches most bugs.

Before any update the two runs compute the same function of the same weights and samples, so only
rounding may differ: scaled gradients, wrong reductions and wrong objectives all show here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from converge_harness.judge.checks.envelope import open_first_step
from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.curves import common_steps, series
from converge_harness.judge.compare.envelopes import Envelope
from converge_harness.judge.compare.experts import is_of_one_expert
from converge_harness.judge.compare.reported import agreement, other_objective
from converge_harness.judge.probed_runs import probing
from converge_harness.model import Evidence, Limit, Outcome, SetSpec, Tier

Envelopes = Mapping[str, Envelope]


@check(Tier.FIRST_STEP)
def loss_first_step(test: Evidence, control: Evidence, envelopes: Envelopes) -> CheckResult:
    """The loss of the first step agrees with the control's.

    The forward pass or the objective differs: no weight was updated yet.
    """
    return _first_step("loss", test, control, envelopes)


@check(Tier.FIRST_STEP)
def grad_norm_first_step(test: Evidence, control: Evidence, envelopes: Envelopes) -> CheckResult:
    """The grad norm of the first step agrees with the control's.

    Gradients are scaled, incomplete or wrong, or their norm is measured wrongly. Under AdamW the
    loss hides a wrong scale: it is the ratio of gradients that moves the weights.
    """
    return _first_step("grad_norm", test, control, envelopes)


@check(Tier.FIRST_STEP)
def loss_recomputed_first_step(
    test: Evidence, control: Evidence, envelopes: Envelopes
) -> CheckResult:
    """The recomputed loss of the first step agrees with the control's.

    The forward pass or the objective itself differs, whatever the trainer reports.
    """
    return _first_step("loss_recomputed", test, control, envelopes)


@check(Tier.FIRST_STEP)
def grad_norm_recomputed_first_step(
    test: Evidence, control: Evidence, envelopes: Envelopes
) -> CheckResult:
    """The recomputed grad norm of the first step agrees with the control's.

    The gradients themselves differ, whatever norm the trainer reports.
    """
    return _first_step("grad_norm_recomputed", test, control, envelopes)


@check(Tier.FIRST_STEP)
def reported_loss_is_recomputed(test: Evidence, control: Evidence) -> CheckResult:
    """The loss that the run reports is the one that its probe recomputes.

    Only the metric is wrong: training may be right and its curve is not.
    """
    if other_objective(test, control):
        return skipped("both runs minimise another loss than cross entropy")
    return _reported(test, "loss")


@check(Tier.FIRST_STEP)
def reported_grad_norm_is_recomputed(test: Evidence) -> CheckResult:
    """The grad norm that the run reports is the one that its probe recomputes.

    Only the metric is wrong; but clipping uses it, so training may follow.
    """
    if late := probing(test).late:
        return skipped(f"gradients were taken {late}, where they may have been clipped")
    return _reported(test, "grad_norm")


@check(Tier.FIRST_STEP)
def gradients_present(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Every parameter that gets a gradient in the control gets one in the run.

    A parameter without gradient stays as it was initialised; the loss hardly shows it. A control
    whose gradients are all zero shows nothing: its probe may look at another model. After the first
    step a single expert may lack one now and then: rounding decides which of them gets no token.
    """
    norms = series(control, "grad_norm_recomputed")
    if norms.steps.size and not np.any(norms.values):
        return invalid(
            f"every gradient of {control.name} is zero at every step, so there is nothing to "
            "compare with: does its probe look at the model that trains, after the backward pass?"
        )
    ours, theirs = series(test, "grads_missing"), series(control, "grads_missing")
    if not ours.steps.size or not theirs.steps.size:
        detail = "the source does not record which parameters got a gradient"
        return skipped(detail) if spec is None else invalid(detail)
    common, mine, other = common_steps(ours.steps, theirs.steps)
    idle = _now_and_then_idle(test, common[1:])
    excused = np.array([sum(at == step for at, _ in idle) for step in common.tolist()])
    more = common[~(ours.values[mine] - excused <= theirs.values[other])]
    allowed_names = {*control.grads_missing, *(name for _, name in idle)}
    names = [name for name in test.grads_missing if name not in allowed_names]
    if not more.size and not names:
        missing = np.setdiff1d(common_steps(test.steps, control.steps).steps, common)
        if missing.size and spec is not None:
            step = int(missing[0])
            return invalid(f"no record at step {step} of which parameters got a gradient", step)
        return passed()
    onset = int(more[0]) if more.size else None
    known = ours.at(onset) if onset is not None else None
    count = known if known is not None else float(len(names))
    which = ", ".join(names) or f"{count:g} parameters"
    when = f" at step {onset}" if onset is not None else ""
    allowed = theirs.at(onset) if onset is not None else None
    return CheckResult(
        Outcome.FAIL,
        f"no gradient for {which}{when}",
        measured=count,
        limit=Limit(allowed or 0.0, "as many as in the control"),
        unit="parameters",
        onset=onset,
    )


def _now_and_then_idle(test: Evidence, later: npt.NDArray[np.int64]) -> frozenset[tuple[int, str]]:
    """Step and name of each missing gradient of a single expert that is trained otherwise.

    All missing gradients of such an expert are in it. It is one that has its gradient at the first
    step, and at half of the ``later`` steps or more (lacking it once is never too often).
    """
    steps: dict[str, set[int]] = {}
    for step, name in test.grads_missing_at:
        if is_of_one_expert(name):
            steps.setdefault(name, set()).add(step)
    most = max(later.size // 2, 1)
    asked = set(later.tolist())
    return frozenset(
        (step, name)
        for name, missing in steps.items()
        if missing <= asked and len(missing) <= most
        for step in missing
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


def _first_step(
    signal: str, test: Evidence, control: Evidence, envelopes: Envelopes
) -> CheckResult:
    """The envelope's first entry, which has to be the first step that both runs have."""
    envelope = envelopes.get(signal)
    if envelope is None:
        return skipped(f"no {signal} on one side")
    step, first = int(envelope.steps[0]), int(common_steps(test.steps, control.steps).steps[0])
    if step != first:
        return invalid(f"no {signal} at the first common step, {first}", step)
    difference, limit = float(envelope.difference[0]), envelope.limit_at(0)
    outside = not difference <= limit.value
    if outside and envelope.open:
        return open_first_step(envelope)
    return CheckResult(
        Outcome.FAIL if outside else Outcome.PASS,
        f"{envelope.test[0]:.8g} (control: {envelope.control[0]:.8g})",
        measured=difference,
        limit=limit,
        unit="relative",
        steps=(step, step),
        onset=step if outside else None,
    )


def _reported(test: Evidence, signal: str) -> CheckResult:
    compared = agreement(test, signal)
    if compared is None:
        return skipped(f"no recomputed {signal}")
    index, outside = compared.worst, compared.outside
    return CheckResult(
        Outcome.FAIL if outside.size else Outcome.PASS,
        f"reported {compared.reported[index]:.8g}, recomputed {compared.recomputed[index]:.8g} "
        f"at step {compared.steps[index]}",
        measured=float(compared.difference[index]),
        limit=compared.limit,
        unit="relative",
        steps=(int(compared.steps[0]), int(compared.steps[-1])),
        onset=int(outside[0]) if outside.size else None,
    )
