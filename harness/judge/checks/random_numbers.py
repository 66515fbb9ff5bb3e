"""Whether random numbers go on through a run, and whether ranks draw numbers of their own.

Tier 2, because no numbers of the first step show it: a resume seeds the generators anew, and masks
of dropout come a second time. Training that draws nothing is not asked.
"""

from __future__ import annotations

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.random_states import (
    drawing,
    is_recorded,
    repeated,
    shared,
    unrecorded,
)
from converge_harness.judge.wording import counted
from converge_harness.model import Evidence, Outcome, Tier

_NOTHING = "the run draws no random numbers in two steps one after the other"


@check(Tier.ENVELOPE)
def random_numbers_go_on(test: Evidence, control: Evidence) -> CheckResult:
    """No step draws the random numbers of an earlier one, where the control draws others.

    The generators were seeded anew, most likely at a resume that does not restore their states.
    That nothing is drawn is recorded, too, and passes.
    """
    if unknown := _unknown(test, control):
        return unknown
    drawn = drawing(test)
    if not drawn:
        return passed(_NOTHING)
    if not drawing(control):
        return passed("the control draws no random numbers")
    found = repeated(test, control)
    if found is None:
        return passed(f"{counted(len(drawn), 'step')} that draw, none as an earlier one")
    return CheckResult(
        Outcome.FAIL,
        f"step {found.step} begins with the random generators as they were before step {found.of}, "
        f"and so do the steps after both: the same numbers are drawn again",
        onset=found.step,
    )


@check(Tier.ENVELOPE)
def ranks_draw_apart(test: Evidence, control: Evidence) -> CheckResult:
    """Ranks that train on other samples draw other random numbers, if the control's ranks do.

    Otherwise all of them drop the same units, which is less random than it should be.
    """
    if unknown := _unknown(test, control):
        return unknown
    ours, theirs = shared(test), shared(control)
    if not ours or not theirs:
        return passed("no random numbers are drawn on several data-parallel ranks of both runs")
    if any(theirs.values()):
        return passed("ranks of the control draw the same numbers, too")
    alike = [step for step, same in ours.items() if same]
    if not alike:
        return passed(f"{counted(len(ours), 'step')} that draw")
    return CheckResult(
        Outcome.FAIL,
        f"from step {alike[0]} on, ranks that train on other samples draw from random generators "
        "in equal states, and those of the control do not",
        onset=alike[0],
    )


def _unknown(test: Evidence, control: Evidence) -> CheckResult | None:
    """Why nothing can be said; None if both record all that they drew."""
    for run in (test, control):
        if not is_recorded(run):
            return skipped(f"{run.name} does not record which random numbers it draws")
        step = unrecorded(run)
        if step is not None:
            return invalid(f"{run.name} does not record what it drew in step {step}", step)
    return None


CHECKS: tuple[Question, ...] = (random_numbers_go_on, ranks_draw_apart)
