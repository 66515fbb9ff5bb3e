"""Tier 0: whether the evidence is whole, and speaks about the comparison that was meant.

Broken evidence is INVALID; a test set that turned non-finite while its control did not is a FAIL.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.judge.agreement import agreement, other_objective
from harness.judge.alone import curves_alone
from harness.judge.apart import apart
from harness.judge.check import Finding, Question, check, counted, invalid, passed, skipped
from harness.judge.curves import has
from harness.judge.floors import JUDGED_SIGNALS
from harness.judge.programs import BEFORE_CLIPPING, probing, required
from harness.judge.requeues import badly_requeued
from harness.judge.soundness import (
    Flaw,
    began_later,
    disordered,
    missing_values,
    non_finite,
    ranks_disagree,
    replicas_differ,
    resumed,
    unfinished,
)
from harness.model import Calibration, Evidence, Outcome, SetSpec, Tier


@check(Tier.INTEGRITY)
def control_sound(test: Evidence, control: Evidence, control_spec: SetSpec | None) -> Finding:
    """The control is complete and finite, in one piece, and reports what it computes.

    Nothing can be judged against a control that is itself broken: repair or rerun it first. One
    that a scheduler requeued is in one piece when every resume gave back what was saved; one that
    was resumed on purpose never is.
    """
    flaw = (
        resumed(control)
        or unfinished(control)
        or disordered(control)
        or badly_requeued(control, control_spec)
        or missing_values(control, _required(control_spec, control, control))
        or non_finite(control)
        or ranks_disagree(control)
        or replicas_differ(control)
        or _misreports(control, _REPORTED[1:] if other_objective(test, control) else _REPORTED)
    )
    if flaw:
        later = began_later(control) if curves_alone(test, control) else ""
        return invalid(f"the control {control.name} {later or flaw.what}", flaw.step)
    if control.replay_conflicts:
        conflict = control.replay_conflicts[0]
        return invalid(f"the control {control.name} replayed steps with other values: {conflict}")
    lives = f" in {len(control.passes)} passes, requeued by the scheduler"
    return passed(f"{control.steps.size} steps{lives if control.requeued else ''}")


@check(Tier.INTEGRITY)
def repeats_sound(calibration: Calibration | None) -> Finding:
    """The control's repeats are whole, saw the same data, and stay close to it.

    A control that does not reproduce itself teaches an envelope that excuses anything.
    """
    if calibration is None or not calibration.repeats:
        return skipped("no repeats: the limits are floating-point floors alone")
    if calibration.problems:
        return invalid(calibration.problems[0])
    taught, made = calibration.taught_by, len(calibration.repeats)
    same = made - taught
    verb = "is" if same == 1 else "are"
    return passed(f"{made} repeats, of which {same} {verb} bit-identical")


@check(Tier.INTEGRITY)
def complete(test: Evidence) -> Finding:
    """The run finished all of its steps.

    The steps that are missing are the ones that might have diverged.
    """
    flaw = unfinished(test)
    return (
        invalid(f"{test.name} {flaw.what}", flaw.step)
        if flaw
        else passed(f"{test.steps.size} steps")
    )


@check(Tier.INTEGRITY)
def steps_increase(test: Evidence) -> Finding:
    """Every step is recorded in order, and one that a restart replayed came out the same.

    The last values of a replayed step are judged. Other values mean that state was lost at the
    resume, or that the log holds two runs.
    """
    flaw = disordered(test)
    if flaw:
        return invalid(f"{test.name} {flaw.what}", flaw.step)
    if test.replay_conflicts:
        first, more = test.replay_conflicts[0], len(test.replay_conflicts) - 1
        others = f" (and {more} more)" if more else ""
        return invalid(f"{test.name} replayed steps with other values: {first}{others}")
    # Whether replays of passes are alike, the check replays-agree asks.
    alike = "" if test.passes else " alike"
    notes = [f"{counted(len(test.replayed), 'step')} replayed{alike}"] if test.replayed else []
    return passed("; ".join([*notes, *test.problems]))


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

    A run of ours has all of them, and one of another program most. Foreign curves have at least a
    loss, and a grad norm if either side has one: a gate must not become blind because a column
    went missing.
    """
    if spec is not None:
        return JUDGED_SIGNALS if spec.trainer.can.all_signals else required(test, control)
    if has(test, "grad_norm") or has(control, "grad_norm"):
        return ("loss", "grad_norm")
    return ("loss",)


_REPORTED = ("loss", "grad_norm")


def _misreports(evidence: Evidence, signals: Iterable[str]) -> Flaw | None:
    """A reported metric that the run's own probe contradicts."""
    for signal in signals:
        if signal == "grad_norm" and probing(evidence).gradients != BEFORE_CLIPPING:
            continue  # what the probe saw of them may have been clipped
        compared = agreement(evidence, signal)
        if compared is not None and compared.outside.size:
            index = compared.worst
            reported, recomputed = apart(
                float(compared.reported[index]), float(compared.recomputed[index])
            )
            return Flaw(
                f"reports {signal} {reported} at step {compared.steps[index]}, recomputed "
                f"{recomputed}",
                int(compared.outside[0]),
            )
    return None
