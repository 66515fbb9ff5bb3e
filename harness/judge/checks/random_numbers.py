"""Whether random numbers go on through a run, and whether ranks draw numbers of their own.

Tier 2, because no numbers of the first step show it: a resume seeds the generators anew, and masks
of dropout come a second time. Training that draws nothing is not asked.
"""

from __future__ import annotations

from typing import NamedTuple

from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.dropout_masks import (
    first_shared,
    masks_again,
    masks_by_step,
)
from converge_harness.judge.compare.random_states import (
    DrawnAgain,
    Generators,
    drawing,
    effect,
    is_recorded,
    repeats,
    shared,
    unrecorded,
)
from converge_harness.model import Evidence, Outcome, Tier
from converge_harness.wording import counted


@check(Tier.ENVELOPE)
def random_numbers_go_on(generators: tuple[Generators, ...]) -> CheckResult:
    """No step uses the random numbers of an earlier one, where the control draws others.

    The generators were seeded anew, most likely at a resume that does not restore their states, and
    loss or grad norm are off from there on. Numbers that nothing depends on pass, such as the seeds
    that a loader draws. That nothing is drawn is recorded, too, and passes.

    Asked of torch's generators, of Python's ``random`` and of ``numpy.random``. The answer is that
    of the one that fails first, else of one that cannot be judged, else torch's, unless another
    one alone is drawn from.
    """
    answers = [_go_on(each) for each in generators]
    results = [each.result for each in answers]
    failed = [each for each in results if each.outcome is Outcome.FAIL]
    if failed:
        return min(failed, key=lambda each: each.onset or 0)
    unknown = [each for each in results if each.outcome is Outcome.INVALID]
    if unknown:
        return unknown[0]
    drawn_from = [each.result for each in answers if each.both_draw]
    return (drawn_from or results)[0]


class _GoOn(NamedTuple):
    """The answer of one kind of generators."""

    both_draw: bool
    """Whether both runs are known to draw from them in two steps one after the other."""
    result: CheckResult


def _go_on(kind: Generators) -> _GoOn:
    test, control = kind.test, kind.control
    if unknown := _unknown(test, control):
        return _GoOn(both_draw=False, result=unknown)
    drawn = drawing(test)
    if not drawn:
        nothing = "the run draws no random numbers in two steps one after the other"
        return _GoOn(both_draw=False, result=passed(nothing))
    if not drawing(control):
        return _GoOn(both_draw=False, result=passed("the control draws no random numbers"))
    return _GoOn(both_draw=True, result=_drawn_again(kind, len(drawn)))


def _drawn_again(kind: Generators, drawn: int) -> CheckResult:
    """Whether a step of the test begins as an earlier one; ``drawn`` of its steps draw."""
    whose = kind.whose
    again = list(repeats(kind.test, kind.control))
    if not again:
        by = "" if whose == "torch" else f" from {whose}"
        return passed(f"{counted(drawn, 'step')} that draw{by}, none as an earlier one")
    effects = [effect(kind, each) for each in again]
    if True not in effects:
        return _without_effect(again[0], known=None not in effects)
    found = again[effects.index(True)]
    return CheckResult(
        Outcome.FAIL,
        f"step {found.step} begins with the random generators of {whose} as they were before step "
        f"{found.of}, and so do the steps after both: the same numbers are drawn again",
        onset=found.step,
    )


def _without_effect(first: DrawnAgain, *, known: bool) -> CheckResult:
    where = f"step {first.step} begins with the random generators as before step {first.of}"
    if not known:
        return invalid(f"{where}, and no loss shows whether it matters", first.step)
    return passed(f"{where}, without an effect on loss or grad norm: a loader's seed, perhaps")


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


@check(Tier.ENVELOPE)
def dropout_masks_differ(test: Evidence, control: Evidence) -> CheckResult:
    """Dropout masks differ between ranks of other samples and between steps, as the control's do.

    Where they are the same, the same units are dropped, whatever the states of the generators are.
    Asked of the sampled steps in which both runs show their masks.
    """
    ours, theirs = masks_by_step(test), masks_by_step(control)
    seen = test.masks or control.masks
    for run, other in ((test, control), (control, test)):
        # Masks of a generator that is seeded anew leave no trace in its states; others do.
        nothing = not run.masks and is_recorded(run) and not any(run.random_states)
        if nothing and (not seen or any(other.random_states)):
            return passed(f"{run.name} draws no random numbers")
    if not ours or not theirs:
        run = control if ours else test
        return skipped(
            f"{run.name} shows no masks at its sampled steps: it does not call nn.Dropout or "
            "torch.nn.functional.dropout, or is compiled"
        )
    step, again = first_shared(test, control), masks_again(test, control)
    if step is not None and (again is None or step <= again.step):
        return CheckResult(
            Outcome.FAIL,
            f"at step {step} ranks that train on other samples have the same dropout masks, and "
            "those of the control have not",
            onset=step,
        )
    if again is not None:
        return CheckResult(
            Outcome.FAIL,
            f"at step {again.step} every rank has a dropout mask of step {again.of} again, and the "
            "control has others",
            onset=again.step,
        )
    return passed(f"{counted(len(ours.keys() & theirs.keys()), 'sampled step')} with masks")


def _unknown(test: Evidence, control: Evidence) -> CheckResult | None:
    """Why nothing can be said; None if both record all that they drew."""
    if not is_recorded(test) and test.samples and drawing(control):
        return invalid(
            f"{test.name} does not record which random numbers it draws, and the control does: "
            "if an older version of converge made the run, train it again"
        )
    for run in (test, control):
        if not is_recorded(run):
            return skipped(f"{run.name} does not record which random numbers it draws")
        step = unrecorded(run)
        if step is not None:
            return invalid(f"{run.name} does not record what it drew in step {step}", step)
    return None


CHECKS: tuple[Question, ...] = (
    random_numbers_go_on,
    ranks_draw_apart,
    dropout_masks_differ,
)
