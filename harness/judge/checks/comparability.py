"""Tier 0, too: whether the two runs are the comparison that was meant.

Same steps, samples, tokens and learning rates; configurations that differ only where declared; and
what the sets name is what ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.curves import (
    common_steps,
    first_hole,
    has,
    pair,
    relative_difference,
)
from converge_harness.judge.compare.floors import SAME_LR
from converge_harness.judge.degrees import spec_of
from converge_harness.judge.in_force import undeclared_differences
from converge_harness.judge.probed_runs import differently_probed
from converge_harness.judge.soundness import (
    disordered,
    may_count_from_1,
    numbered_otherwise,
    other_data,
    other_means,
    other_steps,
    ranks_disagree,
)
from converge_harness.model import Evidence, InForce, Integers, Limit, Outcome, SetSpec, Tier
from converge_harness.wording import control_called, distinct_digits

LEAST_COVERAGE = 0.5
"""Share of the coarser grid's steps that must be in both curves."""
LARGEST_HOLE = 0.6
"""Largest gap between common steps, as a share of the range: steps 1, 2, 4, 8 … reach a half."""
_NO_AUDIT = (
    "the trainer {!r} has no audit that compares what a set names with what ran: give its "
    "TrainerSpec one (docs/extension.md)"
)


@check(Tier.INTEGRITY)
def control_in_force(control: Evidence, control_spec: SetSpec | None) -> CheckResult:
    """The control runs what it names and nothing else.

    A control with a technique of its own is a reference for something else.
    """
    if control_spec is None:
        return skipped("no experiment file says what the control should run")
    if control.in_force is None:
        return invalid(f"the {control_called(control.name)} left no record of what ran")
    audit = control_spec.trainer.audit
    if audit is None:
        return invalid(_NO_AUDIT.format(control_spec.trainer.kind))
    wrong = [*_of_passes(control, control_spec, audit.not_in_force)]
    wrong += _of_passes(control, control_spec, audit.not_named)
    return _clauses(f"the {control_called(control.name)}: ", wrong)


@check(Tier.INTEGRITY)
def same_steps(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """The run has the control's steps, or covers the same range on another grid.

    The number of steps also shapes the lr schedule, and a step that one side lacks is not compared.
    So a curve has every step, or regularly one in n of them.
    """
    flaw = other_steps(test, control)
    # A program without the probe is not audited, but its job says how many steps it has.
    ours = spec is not None or test.expected_steps is not None
    broken = "" if ours else torn(test) or torn(control)
    if broken:
        return invalid(broken)
    if flaw is None:
        rarely = f", one in {test.logged_every}" if test.logged_every > 1 else ""
        return passed(f"{test.steps.size} steps{rarely}")
    if ours or not test.steps.size:
        return invalid(f"{test.name} {flaw.what}", flaw.step)
    return _covered(test, control)


@check(Tier.INTEGRITY)
def same_numbering(test: Evidence, control: Evidence) -> CheckResult:
    """Both runs count their steps from the same number.

    One log counts from 0 and the other from 1. Compared at common steps, every step of one is
    judged by the next one of the other, and right runs look like different ones.
    """
    flaw = numbered_otherwise(test, control)
    if flaw is None:
        return passed()
    option = "--count-from-1" if may_count_from_1(test, control) else ""
    return invalid(f"{test.name} {flaw.what}", flaw.step, compare_with=option)


@check(Tier.INTEGRITY)
def same_means(test: Evidence, control: Evidence) -> CheckResult:
    """Losses that are means over several steps are compared with means over the same steps.

    The two runs were logged at different intervals. Means over other steps differ by much more than
    correct runs do, and a limit that is learnt from repeats does not allow for it.
    """
    flaw = other_means(test, control)
    if flaw is None:
        return passed()
    # A mean is longer also where a row is missing.
    return invalid(torn(test) or torn(control) or f"{test.name} {flaw.what}", flaw.step)


@check(Tier.INTEGRITY)
def same_data(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Both runs trained on the same samples at every step (batch digests).

    Different data makes different curves: nothing else can be concluded from them.
    """
    known = [digest for digest in test.batch_digests if digest is not None]
    if not known or not control.batch_digests:
        detail = "no batch digests: that both saw the same data is assumed, not proven"
        return skipped(detail) if spec is None else invalid(detail)
    flaw = other_data(test, control)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed()


@check(Tier.INTEGRITY)
def ranks_see_same_batch(test: Evidence, spec: SetSpec | None) -> CheckResult:
    """All ranks of a data-parallel coordinate read the same samples.

    Ranks that share a sample (TP, CP, PP) and read different ones train on garbage.
    """
    if not test.batch_agrees:
        detail = "the source does not record whether ranks share samples"
        return skipped(detail) if spec is None else invalid(detail)
    flaw = ranks_disagree(test)
    return invalid(f"{test.name} {flaw.what}", flaw.step) if flaw else passed()


@check(Tier.INTEGRITY)
def same_tokens(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Both runs count the same valid tokens at every step.

    With another token budget per optimizer step it is another training run.
    """
    return _same_signal(test, control, spec, "tokens", 0.0, "the token budget is exact")


@check(Tier.INTEGRITY)
def same_lr(test: Evidence, control: Evidence, spec: SetSpec | None) -> CheckResult:
    """Both runs use the same learning rate at every step.

    The schedule was configured differently, or restarted after a resume.
    """
    return _same_signal(test, control, spec, "lr", SAME_LR, "rounding of a logged rate")


@check(Tier.INTEGRITY)
def config_differs_as_declared(
    test: Evidence, control: Evidence, spec: SetSpec | None, control_spec: SetSpec | None
) -> CheckResult:
    """The configurations differ only where the sets declare it.

    An undeclared difference makes it unclear what is being compared.
    """
    if test.in_force is None or control.in_force is None:
        detail = "no record of the whole configuration"
        return skipped(detail) if spec is None else invalid(detail)
    same_toolchain = (
        spec is None or control_spec is None or spec.toolchain == control_spec.toolchain
    )
    theirs = control.in_force
    return _clauses(
        "differs, but is not declared: ",
        (
            f"{key}{where}"
            for where, ran in _ran(test)
            for key in undeclared_differences(ran, theirs, same_toolchain=same_toolchain)
        ),
    )


@check(Tier.INTEGRITY)
def named_in_force(test: Evidence, spec: SetSpec | None) -> CheckResult:
    """Every technique, degree and schedule that the set names really ran.

    Numbers of a technique that did not run say nothing about it, however good they look.
    """
    if spec is None:
        return skipped("nothing says what the run should be")
    if test.in_force is None:
        return invalid(f"{test.name} left no record of what ran")
    silent = [each.number for each in test.passes if each.steps.size and each.in_force is None]
    if silent:
        return invalid(f"pass {silent[0]} of {test.name} left no record of what ran")
    audit = spec.trainer.audit
    if audit is None:
        return invalid(_NO_AUDIT.format(spec.trainer.kind))
    return _clauses("", _of_passes(test, spec, audit.not_in_force))


@check(Tier.INTEGRITY)
def nothing_unnamed(test: Evidence, spec: SetSpec | None) -> CheckResult:
    """Nothing ran that the set does not name.

    The set would be blamed for a technique that it does not name.
    """
    if spec is None or test.in_force is None:
        return skipped("nothing says what the run should be")
    audit = spec.trainer.audit
    if audit is None:
        return invalid(_NO_AUDIT.format(spec.trainer.kind))
    return _clauses("", _of_passes(test, spec, audit.not_named))


@check(Tier.INTEGRITY)
def probed_alike(test: Evidence, control: Evidence) -> CheckResult:
    """The probes of both runs saw the same parts of their loops.

    Gradients that one side took before clipping and the other after it cannot be compared.
    """
    if test.in_force is None and control.in_force is None:
        return skipped("neither run was probed: nothing but their curves was compared")
    return _clauses("", differently_probed(test, control))


def _of_passes(
    test: Evidence, spec: SetSpec, question: Callable[[SetSpec, InForce], Iterable[str]]
) -> Iterator[str]:
    """A question's clauses; of a run in several passes, each pass against what it should be."""
    if test.in_force is not None and not test.passes:
        yield from question(spec, test.in_force)
    for each in test.passes:
        if each.in_force is not None:
            for clause in question(spec_of(spec, each), each.in_force):
                yield f"{clause} (pass {each.number})"


def _ran(test: Evidence) -> Iterator[tuple[str, InForce]]:
    """What was in force, once or in every pass, with a note that says in which pass."""
    if test.in_force is not None and not test.passes:
        yield "", test.in_force
    for each in test.passes:
        if each.in_force is not None:
            yield f" (pass {each.number})", each.in_force


def torn(evidence: Evidence) -> str:
    """Why an imported curve is incomplete, judged by itself; empty if it is complete."""
    if evidence.contradictions:
        return f"{evidence.name} contradicts itself: {evidence.contradictions[0]}"
    # Another check finds steps that are out of order.
    hole = first_hole(evidence.steps) if disordered(evidence) is None else None
    return f"{evidence.name} {hole.text}" if hole else ""


def _covered(test: Evidence, control: Evidence) -> CheckResult:
    """Curves logged at different steps are judged at their common steps, if those cover both."""
    common = common_steps(test.steps, control.steps).steps
    coarser = min(test, control, key=lambda evidence: evidence.steps.size)
    share = common.size / max(coarser.steps.size, 1)
    text = (
        f"{common.size} common steps of {test.steps.size} in {test.name} and "
        f"{control.steps.size} in the control"
    )
    if share < LEAST_COVERAGE:
        return CheckResult(
            Outcome.INVALID,
            f"too little to compare: {text}",
            measured=share,
            limit=Limit(LEAST_COVERAGE, "of the coarser grid"),
            unit="of the steps",
        )
    if control.steps.size > 1 and np.all(np.diff(control.steps) == 1):
        rare = np.flatnonzero(np.diff(test.steps) > 1)
        if rare.size:
            before, after = test.steps[rare[0] : rare[0] + 2]
            return invalid(
                f"{test.name} has no step between {before} and {after}, and its control has every "
                f"step: {text}; log every step of the test set, or give a control that was logged "
                "as rarely"
            )
    first, last = int(common[0]), int(common[-1])
    gaps = np.diff(common)
    if gaps.size and int(gaps.max()) > LARGEST_HOLE * (last - first):
        hole = int(np.argmax(gaps))
        return invalid(
            f"no common step between {common[hole]} and {common[hole + 1]}: {text}",
            int(common[hole + 1]),
        )
    gap = _last_gap(coarser.steps)
    at_the_end = all(int(each.steps[-1]) - last < gap for each in (test, control))
    for evidence in (test, control):
        starts, ends = int(evidence.steps[0]), int(evidence.steps[-1])
        late = first - starts >= _last_gap(coarser.steps[::-1])
        if late or ends - last >= gap:
            # One run was resumed, and both go on to the end.
            resumed = first > starts and at_the_end
            alone = f"; converge compare --from {first} compares these alone" if resumed else ""
            return invalid(
                f"only steps {first} to {last} are in both; {evidence.name} has {starts} to {ends}"
                f"{alone}",
                None if late else last,
                compare_with=f"--from {first}" if resumed else "",
            )
    return CheckResult(
        Outcome.PASS,
        f"judged at {text}",
        measured=share,
        limit=Limit(LEAST_COVERAGE, "of the coarser grid"),
        unit="of the steps",
        steps=(first, last),
    )


def _last_gap(steps: Integers) -> int:
    """The distance of the last two points: a curve may end that much before another, not more."""
    gaps = np.abs(np.diff(steps))
    return int(gaps[-1]) if gaps.size else 1


CHECKS: tuple[Question, ...] = (
    same_steps,
    same_numbering,
    same_means,
    same_data,
    ranks_see_same_batch,
    same_tokens,
    same_lr,
    config_differs_as_declared,
    control_in_force,
    named_in_force,
    nothing_unnamed,
    probed_alike,
)


def _clauses(prefix: str, clauses: Iterable[str]) -> CheckResult:
    """INVALID with the clauses; PASS when there are none."""
    found = list(clauses)
    return invalid(prefix + "; ".join(found)) if found else passed()


def _same_signal(
    test: Evidence,
    control: Evidence,
    spec: SetSpec | None,
    signal: str,
    limit: float,
    origin: str,
) -> CheckResult:
    curves = pair(test, control, signal)
    absent = not has(test, signal) or not has(control, signal)
    if absent and spec is None:
        return skipped(f"no {signal} on one side")
    if absent or curves.steps.size < common_steps(test.steps, control.steps).steps.size:
        return invalid(f"{signal} is missing at some step of {test.name} or {control.name}")
    difference = relative_difference(curves.test, curves.control)
    outside = np.flatnonzero(~(difference <= limit))
    measured = float(difference.max()) if difference.size else None
    detail, onset = "", None
    if outside.size:
        first = int(outside[0])
        onset = int(curves.steps[first])
        of_test, of_control = distinct_digits(
            float(curves.test[first]), float(curves.control[first])
        )
        detail = f"{signal} is {of_test} at step {onset}, {of_control} in the control"
    return CheckResult(
        Outcome.INVALID if outside.size else Outcome.PASS,
        detail,
        measured=measured,
        limit=Limit(limit, origin),
        unit="relative",
        onset=onset,
    )
