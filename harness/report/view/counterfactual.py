"""What would change a verdict, in sentences; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from converge_harness.model import Calibration, Check, Judgement, Outcome, Verdict
from converge_harness.report.text import digits, excess
from converge_harness.wording import counted

_NAMED = 3
"""Checks that are named one by one."""


def counterfactual(verdict: Verdict, calibration: Calibration | None) -> tuple[str, ...]:
    """How far measured values are from another verdict, and which evidence is missing."""
    match verdict.judgement:
        case Judgement.PASS:
            sentences = _of_pass(verdict.checks)
        case Judgement.FAIL:
            by_steps = "loss-envelope" not in verdict.not_asked
            sentences = _of_fail(verdict.checks, calibration, by_steps=by_steps)
        case Judgement.ERROR:
            sentences = iter(("A run that reaches its last step would be judged.",))
        case Judgement.INVALID:
            sentences = _of_unsettled(verdict.checks, Outcome.INVALID, "in order")
        case Judgement.INCONCLUSIVE:
            sentences = _of_unsettled(verdict.checks, Outcome.INCONCLUSIVE, "settled")
    return (*sentences, *_unseen(verdict.checks))


def _of_pass(checks: Sequence[Check]) -> Iterator[str]:
    measured = [
        (check.measured / check.limit.value, check, check.limit.value)
        for check in checks
        if check.measured is not None
        and check.limit is not None
        and check.limit.value > 0
        and check.outcome is Outcome.PASS
    ]
    if not measured:
        yield "It would FAIL if any check did."
        return
    share, check, limit = max(measured, key=lambda each: each[0])
    reached = f"{check.name} reached {digits(check.measured)} of its limit {digits(limit)}"
    if share > 0:
        room = excess(limit, check.measured)
        yield f"Nearest to a FAIL: {reached}; more than {room} that would be outside."
    else:
        yield f"Nothing came near a limit: {reached}."


def _of_fail(
    checks: Sequence[Check], calibration: Calibration | None, *, by_steps: bool
) -> Iterator[str]:
    failed = [check for check in checks if check.outcome is Outcome.FAIL]
    if not failed:
        return
    missing = next((check.name for check in checks if check.outcome is Outcome.INVALID), None)
    if len(failed) == 1 and missing:
        yield f"It would PASS only if {failed[0].name} and {missing} did."
    elif len(failed) == 1:
        yield f"It would PASS if {failed[0].name} did: every other check holds."
    else:
        yield f"It would PASS only if all {len(failed)} failed checks did."
    for check in failed[:_NAMED]:
        if check.measured is None or check.limit is None:
            continue
        times = excess(check.measured, check.limit.value)
        beyond = f", {times} its limit" if times else ""
        unit = f" {check.unit}" if check.unit else ""
        yield (
            f"{check.name}: {digits(check.measured)}{unit}{beyond} of "
            f"{digits(check.limit.value)} ({check.limit.origin})."
        )
    if by_steps and (calibration is None or not calibration.taught_by):
        yield (
            "These limits are fixed floors, not learnt from repeats of the control: repeats would "
            "show how much correct runs differ here."
        )


def _of_unsettled(checks: Sequence[Check], outcome: Outcome, word: str) -> Iterator[str]:
    found = [check for check in checks if check.outcome is outcome]
    for check in found[:_NAMED]:
        reason = check.detail or check.title
        yield f"{check.name} must be {word}: {reason.rstrip('.')}."
    if len(found) > _NAMED:
        yield f"So must {counted(len(found) - _NAMED, 'other check')}."


def _unseen(checks: Sequence[Check]) -> Iterator[str]:
    names = [check.name for check in checks if check.outcome is Outcome.SKIPPED]
    if names:
        shown = ", ".join(names[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"Without evidence, so any error may be hidden there: {shown}{more}."
