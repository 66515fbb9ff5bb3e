"""Tier 0: whether the evidence is whole, and speaks about the comparison that was meant.

Broken evidence is INVALID; a test set that turned non-finite while its control did not is a FAIL.
"""

from __future__ import annotations

from harness.judge.agreement import agreement
from harness.judge.check import Finding, Question, check, invalid, passed, skipped
from harness.judge.curves import has, pair
from harness.judge.envelope import spread
from harness.judge.floors import JUDGED_SIGNALS, SPREAD_CEILING
from harness.judge.soundness import (
    Flaw,
    disordered,
    missing_values,
    non_finite,
    other_data,
    other_steps,
    ranks_disagree,
    unfinished,
)
from harness.model import Evidence, Limit, Outcome, SetSpec, Tier


@check(Tier.INTEGRITY)
def control_sound(control: Evidence, control_spec: SetSpec | None) -> Finding:
    """The control is complete and finite, and reports what it computes.

    Nothing can be judged against a control that is itself broken: repair or rerun it first.
    """
    flaw = (
        unfinished(control)
        or disordered(control)
        or missing_values(control, _required(control_spec, control, control))
        or non_finite(control)
        or ranks_disagree(control)
        or _misreports(control)
    )
    if flaw:
        return invalid(f"the control {control.name} {flaw.what}", flaw.step)
    return passed(f"{len(control.steps)} steps")


@check(Tier.INTEGRITY)
def repeats_sound(control: Evidence, repeats: tuple[Evidence, ...]) -> Finding:
    """The control's repeats are whole, saw the same data, and stay close to it.

    A control that does not reproduce itself teaches an envelope that excuses anything.
    """
    if not repeats:
        return skipped("no repeats: the limits are floating-point floors alone")
    for repeat in repeats:
        flaw = unfinished(repeat) or disordered(repeat) or non_finite(repeat)
        flaw = flaw or other_steps(repeat, control) or other_data(repeat, control)
        if flaw:
            return invalid(f"the repeat {repeat.name} {flaw.what}", flaw.step)
    for signal in JUDGED_SIGNALS:
        steps = pair(control, control, signal).steps
        widest = spread(signal, control, repeats, steps)
        outside = steps[~(widest <= SPREAD_CEILING[signal])]
        if outside.size:
            return Finding(
                Outcome.INVALID,
                f"the control {control.name} does not reproduce itself: {signal} of its repeats "
                f"differs by {widest[-1]:.2g}, from step {outside[0]} on by too much to judge with",
                measured=float(widest[-1]),
                limit=Limit(SPREAD_CEILING[signal], "largest spread that may teach an envelope"),
                unit="relative",
                onset=int(outside[0]),
            )
    return passed(f"{len(repeats)} repeats")


@check(Tier.INTEGRITY)
def complete(test: Evidence) -> Finding:
    """The run finished all of its steps.

    The steps that are missing are the ones that might have diverged.
    """
    flaw = unfinished(test)
    return (
        invalid(f"{test.name} {flaw.what}", flaw.step)
        if flaw
        else passed(f"{len(test.steps)} steps")
    )


@check(Tier.INTEGRITY)
def steps_increase(test: Evidence) -> Finding:
    """Every step is recorded once and in order.

    A repeated step comes from a resume that replays, or from two runs in one log.
    """
    flaw = disordered(test)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed()


@check(Tier.INTEGRITY)
def values_present(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Every step has a value for every judged signal.

    A value that is not there is never taken for a value that is right.
    """
    required = _required(spec, test, control)
    for evidence in (test, control):
        flaw = missing_values(evidence, required)
        if flaw:
            return invalid(f"{evidence.name} {flaw.what}", flaw.step)
    return passed()


@check(Tier.INTEGRITY)
def finite(test: Evidence) -> Finding:
    """Loss and grad norm stay finite, as the control's do.

    The test set diverged to NaN or infinity where its control did not.
    """
    flaw = non_finite(test)
    if flaw:
        return Finding(Outcome.FAIL, f"{flaw.what}, where the control is finite", onset=flaw.step)
    return passed()


CHECKS: tuple[Question, ...] = (
    control_sound,
    repeats_sound,
    complete,
    steps_increase,
    values_present,
    finite,
)


def _required(spec: SetSpec | None, test: Evidence, control: Evidence) -> tuple[str, ...]:
    """Signals without which there is no verdict.

    A run of ours has all of them. Foreign curves have at least a loss, and a grad norm if either
    side has one: a gate must not become blind because a column went missing.
    """
    if spec is not None:
        return JUDGED_SIGNALS
    if has(test, "grad_norm") or has(control, "grad_norm"):
        return ("loss", "grad_norm")
    return ("loss",)


def _misreports(evidence: Evidence) -> Flaw | None:
    """A reported metric that the run's own probe contradicts."""
    for signal in ("loss", "grad_norm"):
        compared = agreement(evidence, signal)
        if compared is not None and compared.outside:
            index = compared.worst
            return Flaw(
                f"reports {signal} {compared.reported[index]:.6g} at step "
                f"{compared.steps[index]}, recomputed {compared.recomputed[index]:.6g}",
                compared.outside[0],
            )
    return None
