"""Tier 0: whether the evidence is whole, and speaks about the comparison that was meant.

Broken evidence is INVALID; a test set that turned non-finite while its control did not is a FAIL.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.judge.agreement import agreement
from harness.judge.check import Finding, Question, check, invalid, passed, skipped
from harness.judge.curves import has, pair, relative_difference
from harness.judge.envelope import spread
from harness.judge.floors import JUDGED_SIGNALS, SAME_LR, SPREAD_CEILING
from harness.judge.in_force import not_in_force, not_named, undeclared_differences
from harness.judge.soundness import Flaw, disordered, missing_values, non_finite, unfinished
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
        or _ranks_disagree(control)
        or _misreports(control)
    )
    if flaw:
        return invalid(f"the control {control.name} {flaw.what}", flaw.step)
    return passed(f"{len(control.steps)} steps")


@check(Tier.INTEGRITY)
def control_in_force(control: Evidence, control_spec: SetSpec | None) -> Finding:
    """The control runs what it names and nothing else.

    A control with a technique of its own is a reference for something else.
    """
    if control_spec is None:
        return skipped("nothing says what the control should be")
    if control.in_force is None:
        return invalid(f"the control {control.name} left no record of what ran")
    wrong = [*not_in_force(control_spec, control.in_force)]
    wrong += not_named(control_spec, control.in_force)
    return _clauses(f"the control {control.name}: ", wrong)


@check(Tier.INTEGRITY)
def repeats_sound(control: Evidence, repeats: tuple[Evidence, ...]) -> Finding:
    """The control's repeats are whole, saw the same data, and stay close to it.

    A control that does not reproduce itself teaches an envelope that excuses anything.
    """
    if not repeats:
        return skipped("no repeats: the limits are floating-point floors alone")
    for repeat in repeats:
        flaw = unfinished(repeat) or disordered(repeat) or non_finite(repeat)
        flaw = flaw or _other_steps(repeat, control) or _other_data(repeat, control)
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
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed(_count(test))


@check(Tier.INTEGRITY)
def steps_increase(test: Evidence) -> Finding:
    """Every step is recorded once and in order.

    A repeated step comes from a resume that replays, or from two runs in one log.
    """
    flaw = disordered(test)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed()


@check(Tier.INTEGRITY)
def same_steps(test: Evidence, control: Evidence) -> Finding:
    """The run has the same steps as the control.

    The number of steps also shapes the lr schedule, and what one side lacks nobody compared.
    """
    flaw = _other_steps(test, control)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed(_count(test))


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


@check(Tier.INTEGRITY)
def same_data(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Both runs trained on the same samples at every step (batch digests).

    Different data makes different curves: nothing else can be concluded from them.
    """
    known = [digest for digest in test.batch_digests if digest is not None]
    if not known or not control.batch_digests:
        detail = "no batch digests: that both saw the same data is assumed, not proven"
        return skipped(detail) if spec is None else invalid(detail)
    flaw = _other_data(test, control)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed()


@check(Tier.INTEGRITY)
def ranks_see_same_batch(test: Evidence, spec: SetSpec | None) -> Finding:
    """All ranks of a data-parallel coordinate read the same samples.

    Ranks that share a sample (TP, CP, PP) and read different ones train on garbage.
    """
    if not test.batch_agrees:
        detail = "the source does not tell whether ranks share samples"
        return skipped(detail) if spec is None else invalid(detail)
    flaw = _ranks_disagree(test)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed()


@check(Tier.INTEGRITY)
def same_tokens(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Both runs count the same valid tokens at every step.

    A different token budget per optimizer step is a different training.
    """
    return _same_signal(test, control, spec, "tokens", 0.0, "the token budget is exact")


@check(Tier.INTEGRITY)
def same_lr(test: Evidence, control: Evidence, spec: SetSpec | None) -> Finding:
    """Both runs use the same learning rate at every step.

    The schedule was configured differently, or restarted after a resume.
    """
    return _same_signal(test, control, spec, "lr", SAME_LR, "rounding of a logged rate")


@check(Tier.INTEGRITY)
def config_differs_as_declared(
    test: Evidence, control: Evidence, spec: SetSpec | None, control_spec: SetSpec | None
) -> Finding:
    """The configurations differ only where the sets declare it.

    An undeclared difference makes it unclear what is being compared.
    """
    if test.in_force is None or control.in_force is None:
        detail = "no record of the whole configuration"
        return skipped(detail) if spec is None else invalid(detail)
    same_toolchain = (
        spec is None or control_spec is None or spec.toolchain == control_spec.toolchain
    )
    keys = undeclared_differences(test.in_force, control.in_force, same_toolchain=same_toolchain)
    return _clauses("differs, but is not declared: ", keys)


@check(Tier.INTEGRITY)
def named_in_force(test: Evidence, spec: SetSpec | None) -> Finding:
    """Every technique, degree and schedule that the set names really ran.

    Numbers of a technique that did not run say nothing about it, however good they look.
    """
    if spec is None:
        return skipped("nothing says what the run should be")
    if test.in_force is None:
        return invalid(f"{test.name} left no record of what ran")
    return _clauses("", not_in_force(spec, test.in_force))


@check(Tier.INTEGRITY)
def nothing_unnamed(test: Evidence, spec: SetSpec | None) -> Finding:
    """Nothing ran that the set does not name.

    A technique that slipped in would be blamed on what the set names.
    """
    if spec is None or test.in_force is None:
        return skipped("nothing says what the run should be")
    return _clauses("", not_named(spec, test.in_force))


CHECKS: tuple[Question, ...] = (
    control_sound,
    control_in_force,
    repeats_sound,
    complete,
    steps_increase,
    same_steps,
    values_present,
    finite,
    same_data,
    ranks_see_same_batch,
    same_tokens,
    same_lr,
    config_differs_as_declared,
    named_in_force,
    nothing_unnamed,
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


def _count(evidence: Evidence) -> str:
    return f"{len(evidence.steps)} steps"


def _clauses(prefix: str, clauses: Iterable[str]) -> Finding:
    """INVALID with the clauses; PASS when there are none."""
    found = list(clauses)
    return invalid(prefix + "; ".join(found)) if found else passed()


def _other_steps(evidence: Evidence, control: Evidence) -> Flaw | None:
    ours, theirs = set(evidence.steps), set(control.steps)
    if ours == theirs:
        return None
    step = min(ours ^ theirs)
    which = "lacks" if step in theirs else "alone has"
    return Flaw(f"{which} step {step} ({len(ours)} steps, the control {len(theirs)})", step)


def _other_data(evidence: Evidence, control: Evidence) -> Flaw | None:
    """The first common step whose batch digest differs, or is missing on one side."""
    if not evidence.batch_digests and not control.batch_digests:
        return None
    ours = dict(zip(evidence.steps, evidence.batch_digests, strict=False))
    theirs = dict(zip(control.steps, control.batch_digests, strict=False))
    for step in sorted({*evidence.steps} & {*control.steps}):
        mine, other = ours.get(step), theirs.get(step)
        if mine is None or other is None:
            return Flaw(f"or its control has no batch digest at step {step}", step)
        if mine != other:
            return Flaw(f"trained on other samples than the control at step {step}", step)
    return None


def _ranks_disagree(evidence: Evidence) -> Flaw | None:
    if not evidence.batch_agrees:
        return None
    agrees = dict(zip(evidence.steps, evidence.batch_agrees, strict=False))
    for step in evidence.steps:
        if agrees.get(step) is None:
            return Flaw(f"does not tell at step {step} whether its ranks share samples", step)
        if not agrees[step]:
            return Flaw(f"has ranks that should share samples and do not, at step {step}", step)
    return None


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


def _same_signal(
    test: Evidence,
    control: Evidence,
    spec: SetSpec | None,
    signal: str,
    limit: float,
    origin: str,
) -> Finding:
    curves = pair(test, control, signal)
    absent = not has(test, signal) or not has(control, signal)
    if absent and spec is None:
        return skipped(f"no {signal} on one side")
    if absent or curves.steps.size < len(set(test.steps) & set(control.steps)):
        return invalid(f"{signal} is missing at some step of {test.name} or {control.name}")
    difference = relative_difference(curves.test, curves.control)
    outside = [i for i, value in enumerate(difference.tolist()) if not value <= limit]
    measured = float(difference.max()) if difference.size else None
    detail, onset = "", None
    if outside:
        first = outside[0]
        onset = int(curves.steps[first])
        detail = (
            f"{signal} is {curves.test[first]:.6g} at step {onset}, "
            f"{curves.control[first]:.6g} in the control"
        )
    return Finding(
        Outcome.INVALID if outside else Outcome.PASS,
        detail,
        measured=measured,
        limit=Limit(limit, origin),
        unit="relative",
        onset=onset,
    )
