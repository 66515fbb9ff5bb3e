"""Runs of several seeds: whether they can be compared at all, and what their losses say.

The statistics are in :mod:`converge_harness.judge.compare.seeds`; the questions are here. Whether a
set is the same as its control is asked seed by seed where both were trained with the same seeds.
Whether an intended change is no worse is asked of the two groups as wholes.

With a target loss the question is how many steps the seeds of both sides need to reach it. That is
how MLPerf Training states convergence: not how low a loss is at a step, but when it is reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import combinations
from typing import NamedTuple

import numpy as np

from converge_harness.judge.checks.comparability import LEAST_COVERAGE, torn
from converge_harness.judge.checks.equivalence import (
    OUTCOMES,
    loss_of,
    margin_of,
    outlook,
    printed_too_coarsely,
)
from converge_harness.judge.checks.question import (
    CheckResult,
    Question,
    check,
    invalid,
    passed,
    skipped,
)
from converge_harness.judge.compare.curves import (
    has,
    rounding_of,
    rounding_share,
    second_half,
    series,
)
from converge_harness.judge.compare.curves import signed_difference as difference_of
from converge_harness.judge.compare.seeds import (
    FEWEST_SEEDS,
    MOST_SEEDS,
    Group,
    OverSeeds,
    blocks,
    groups_of,
    over_seeds,
    step_noise,
    trajectory,
)
from converge_harness.judge.compare.tost import ALPHA, FEWEST, Answer, equivalence
from converge_harness.judge.comparison import RunComparison
from converge_harness.model import (
    Check,
    Evidence,
    Floats,
    Integers,
    Limit,
    Outcome,
    RunStatus,
    SeedRuns,
    Tier,
)
from converge_harness.wording import control_called, counted

SAME_START = 1e-5
"""Relative difference of the loss below which two curves start alike: reruns of one seed differ by
rounding (1e-7 at first), and other initial weights or samples by a thousandth and more."""
START = 5
"""The steps that are compared for that: not one of them may be further off."""
_MOST_LENGTHENED = 100
"""Multiple of its length beyond which nobody trains a run to settle a question."""
PRINTED_START = 25
"""The same where losses are printed more coarsely than that. Losses of two seeds whose noise is a
unit of the last digit are alike to a unit at so many steps once in ten million."""
SAME_BUDGET = 0.01
"""Relative difference of the valid tokens of whole runs that other samples may make; another batch
size or sequence length makes more."""

_WORST = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE, Outcome.SKIPPED, Outcome.PASS)


def of_every(question: Question, compared: RunComparison, seeds: SeedRuns) -> Check:
    """Ask a question of every run instead of the first two, and answer with the worst.

    Every run of the test set is compared with the first control, and every other control with the
    first run of the test set. A run without evidence does not pass.
    """
    with_control = [(test, seeds.control[0]) for test in seeds.test]
    with_test = [(seeds.test[0], control) for control in seeds.control[1:]]
    found: list[tuple[Check, Evidence]] = []
    for number, (test, control) in enumerate([*with_control, *with_test]):
        about = test if number < len(with_control) else control
        found.append((question(replace(compared, test=test, control=control)), about))
    worst, about = min(found, key=lambda each: _WORST.index(each[0].outcome))
    unnamed = worst.outcome in (Outcome.FAIL, Outcome.INVALID) and about.name not in worst.detail
    return replace(worst, detail=f"{about.name}: {worst.detail}") if unnamed else worst


@check(Tier.INTEGRITY)
def seeds_comparable(seeds: SeedRuns) -> CheckResult:
    """Test set and control have at least two seeds each, which are different runs.

    One run does not show how much seeds differ, and one that is counted twice shows no difference
    at all, so that every difference would be significant. Two runs of a side are the same seed if
    their losses are the same to the last bit, or the same except for rounding at their first steps.
    """
    for side, runs in _sides(seeds):
        if len(runs) < FEWEST_SEEDS:
            one = counted(len(runs), "seed")
            return invalid(
                f"{side} has {one}: at least {FEWEST_SEEDS} per side show how much seeds differ; "
                "with 5 or more, limits are much narrower"
            )
        for first, second in combinations(runs, 2):
            if again := _same_seed(first, second):
                return invalid(
                    f"{first.name} and {second.name} of {side} {again}: one seed, or one file, "
                    "counts once"
                )
    # Other checks report a run that did not end by itself: it crashed, or the control is unsound.
    finished = RunStatus.FINISHED
    every = [each for each in (*seeds.control, *seeds.test) if each.status is finished]
    if not every:
        return passed()
    common = reduce(np.intersect1d, [each.steps for each in every])
    fewest = min(each.steps.size for each in every)
    if common.size < max(LEAST_COVERAGE * fewest, FEWEST_SEEDS):
        first = every[0]
        shared = [int(np.intersect1d(first.steps, each.steps).size) for each in every]
        least = int(np.argmin(shared))
        return invalid(
            f"the {len(every)} curves have {counted(int(common.size), 'step')} in common, "
            f"{every[least].name} and {first.name} {shared[least]}, and the shortest has {fewest}: "
            "log them at the same steps"
        )
    return passed(f"{len(seeds.test)} seeds, and {len(seeds.control)} of the control")


@check(Tier.INTEGRITY)
def same_token_budget(seeds: SeedRuns) -> CheckResult:
    """Every seed whose tokens are counted trains on as many valid ones as the first.

    Other samples may hold a few more or less; a difference above 1% makes it another training run.
    """
    every = [each for each in (*seeds.control, *seeds.test) if has(each, "tokens")]
    if len(every) <= 1:
        return skipped("no token counts to compare in the curves")
    means = [float(np.mean(series(each, "tokens").values)) for each in every]
    expected = means[0]
    off = [abs(mean - expected) / expected if expected > 0 else math.inf for mean in means]
    worst = int(np.argmax(off))
    wrong = not off[worst] <= SAME_BUDGET
    return CheckResult(
        Outcome.INVALID if wrong else Outcome.PASS,
        f"{every[worst].name} trains on {means[worst]:.6g} tokens a step, {every[0].name} on "
        f"{expected:.6g}"
        if wrong
        else "",
        measured=off[worst],
        limit=Limit(SAME_BUDGET, "what other samples may make"),
        unit="relative",
    )


@check(Tier.EQUIVALENCE)
def loss_same_over_seeds(
    test: Evidence, control: Evidence, seeds: SeedRuns, margin: float | None
) -> CheckResult:
    """The mean loss of the second half is the control's within the margin, over all seeds.

    Seeds of the test set end higher or lower than those of the control by more than the margin, and
    by more than seeds differ by chance.
    """
    limit = margin_of(test, control, margin)
    return _of_level(seeds, limit, paired=seeds.paired)[0]


@check(Tier.EQUIVALENCE)
def trajectory_same_over_seeds(
    test: Evidence, control: Evidence, seeds: SeedRuns, margin: float | None
) -> CheckResult:
    """No part of the run is off by more than the margin, beyond what seeds differ by.

    The run is split into up to 8 parts, each with its mean loss over the seeds: some part is off by
    more than chance, even where the end is not. A part that is not shown to be off is not thereby
    shown to be the same.
    """
    limit = margin_of(test, control, margin)
    read = _losses(seeds)
    if isinstance(read, CheckResult):
        return read
    parts = trajectory(
        read.test, read.control, paired=seeds.paired, alarm=_SHARE, rounding=read.rounding
    )
    off = [part for part in parts if part.excess > limit.value]
    worst = max(parts, key=lambda part: part.excess)
    shown = off[0] if off else worst
    first, last = (int(read.steps[at]) for at in shown.block)
    where = (
        f"{len(off)} of {len(parts)} parts are off beyond chance, first"
        if off
        else f"none of {len(parts)} parts is off beyond chance, nearest to it"
    )
    return CheckResult(
        Outcome.FAIL if off else Outcome.PASS,
        f"{where} steps {first} to {last}: {shown.difference:+.2g}, of which "
        f"{max(shown.excess, 0.0):.2g} is more than seeds differ by",
        measured=max(worst.excess, 0.0),
        limit=limit,
        unit="relative",
        steps=(int(read.steps[0]), int(read.steps[-1])),
        onset=first if off else None,
    )


@check(Tier.EQUIVALENCE)
def loss_no_worse(
    test: Evidence, control: Evidence, seeds: SeedRuns | None, margin: float | None
) -> CheckResult:
    """The mean loss of the second half is no higher than the control's by more than the margin.

    A one-sided test: a lower loss is fine. Over the seeds where there are several, with a second
    test of the last eighth of the run; else over the steps of the two runs, which then show it for
    their one seed only.
    """
    limit = margin_of(test, control, margin)
    if seeds is None:
        return _of_one_pair(test, control, limit)
    level, read = _of_level(seeds, limit, one_sided=True)
    if read is None or level.outcome is Outcome.FAIL:
        return level
    return _worse_at_end(level, read, limit) or level


CHECKS: tuple[Question, ...] = (
    seeds_comparable,
    same_token_budget,
    loss_same_over_seeds,
    trajectory_same_over_seeds,
    loss_no_worse,
)

_SHARE = ALPHA / 2
"""Two tests of the same runs, of which one is enough for a FAIL (Bonferroni)."""


class _Losses(NamedTuple):
    """The loss of every run at the steps that all have."""

    signal: str
    steps: Integers
    test: Floats
    """Shape (seeds, steps)."""
    control: Floats
    """Shape (seeds, steps)."""
    rounding: float
    """The rounding of printed values in the second half, relative to the loss."""

    @property
    def half(self) -> int:
        """Where the second half begins: past the warm-up."""
        return int(self.steps.size) // 2


def _losses(seeds: SeedRuns) -> _Losses | CheckResult:
    """The values to compare, or why there are none."""
    every = [*seeds.control, *seeds.test]
    recomputed = all(has(each, "loss_recomputed") for each in every)
    signal = "loss_recomputed" if recomputed else "loss"
    curves = [series(each, signal) for each in every]
    steps = reduce(np.intersect1d, [curve.steps for curve in curves])
    if steps.size < FEWEST_SEEDS:
        return invalid(f"the curves have {counted(int(steps.size), 'step')} in common")
    values = np.array([curve.values[np.searchsorted(curve.steps, steps)] for curve in curves])
    wrong = np.argwhere(~np.isfinite(values))
    if wrong.size:
        run, at = (int(index) for index in wrong[0])
        step = int(steps[at])
        return invalid(
            f"the {signal.replace('_', ' ')} of {every[run].name} is {values[run, at]} at step "
            f"{step}",
            step,
        )
    half = int(steps.size) // 2
    count = len(seeds.control)
    rounded = [
        float(np.mean(rounding_of(each, signal, row) / np.maximum(np.abs(row), _TINY)))
        for each, row in zip(every, values[:, half:], strict=True)
    ]
    rounding = max(rounded[:count]) + max(rounded[count:])
    return _Losses(signal, steps, values[count:], values[:count], rounding)


_TINY = float(np.finfo(np.float64).tiny)


def _of_level(
    seeds: SeedRuns, limit: Limit, *, one_sided: bool = False, paired: bool = False
) -> tuple[CheckResult, _Losses | None]:
    """The check of the mean level, with the test that it comes from; else why there is none."""
    short = next((side for side, runs in _sides(seeds) if len(runs) < FEWEST_SEEDS), None)
    if short:
        return invalid(f"{short} has fewer than {FEWEST_SEEDS} seeds"), None
    read = _losses(seeds)
    if isinstance(read, CheckResult):
        return read, None
    window = slice(read.half, None)
    steps = (int(read.steps[read.half]), int(read.steps[-1]))
    if not read.rounding < limit.value:
        return printed_too_coarsely(read.rounding, limit, read.steps[window]), None
    test, control = read.test[:, window], read.control[:, window]
    found = over_seeds(
        *groups_of(test, control, paired=paired),
        limit.value,
        one_sided=one_sided,
        alarm=_SHARE,
        rounding=read.rounding,
        noise=(step_noise(test - control), 0.0)
        if paired
        else (step_noise(test), step_noise(control)),
    )
    detail = (
        f"mean {read.signal.replace('_', ' ')} of {len(seeds.test)} seeds {found.difference:+.2g} "
        f"± {found.half_width:.1g}, relative to that of the control's {len(seeds.control)}, "
        f"{'seed by seed, ' if paired else ''}over steps {steps[0]} to {steps[1]}"
        f"{_outlook(found, read, limit)}"
    )
    return CheckResult(
        OUTCOMES[found.outcome],
        detail,
        measured=max(found.bound, 0.0),
        limit=limit,
        unit="relative",
        steps=steps,
        further_seeds=found.further_seeds,
    ), read


def _outlook(found: OverSeeds, read: _Losses, limit: Limit) -> str:
    """What would settle it, in seeds per side and in steps."""
    if found.outcome is not Answer.INCONCLUSIVE:
        return ""
    ways = []
    if found.further_seeds is not None:
        ways.append(f"about {counted(found.further_seeds, 'further seed')} per side")
    if found.lengthened is not None and found.lengthened <= _MOST_LENGTHENED:
        whole = int(read.steps[-1] - read.steps[0]) + 1
        further = math.ceil((found.lengthened - 1) * whole)
        ways.append(f"about {further:,} further steps of every run")
    if ways:
        return f": {' or '.join(ways)} would settle it with a probability of 80%"
    return (
        f": too near the margin of {limit.value:g} to say how many further seeds would settle it, "
        f"or more than {MOST_SEEDS:,}"
    )


def _worse_at_end(level: CheckResult, read: _Losses, limit: Limit) -> CheckResult | None:
    """A FAIL where the last part of the run is higher beyond chance, whatever the mean is."""
    part = blocks(int(read.steps.size))[-1]
    window = slice(part.first, part.last + 1)
    found = over_seeds(
        *groups_of(read.test[:, window], read.control[:, window], paired=False),
        limit.value,
        one_sided=True,
        alarm=_SHARE,
        rounding=read.rounding,
    )
    if found.outcome is not Answer.DIFFERENT:
        return None
    first, last = (int(read.steps[at]) for at in part)
    return replace(
        level,
        outcome=Outcome.FAIL,
        detail=f"mean loss {found.difference:+.2g} over the last steps {first} to {last}, which is "
        "above the margin by more than seeds differ by",
        measured=found.difference,
        steps=(first, last),
        further_seeds=None,
    )


def _of_one_pair(test: Evidence, control: Evidence, limit: Limit) -> CheckResult:
    """Over the steps of two runs, which show it for one seed only."""
    signal, curves = loss_of(test, control)
    window = second_half(curves)
    count = int(window.steps.size)
    printed = float(np.mean(rounding_share(test, control, signal, window))) if count else 0.0
    if not printed < limit.value:
        return printed_too_coarsely(printed, limit, window.steps)
    if count < FEWEST:
        return CheckResult(
            Outcome.INCONCLUSIVE,
            f"it is open whether the mean loss is within the margin of {limit.value:g}: "
            f"{counted(int(curves.steps.size), 'step')} in common, at least {2 * FEWEST} are "
            "needed",
            limit=limit,
            unit="relative",
        )
    difference = difference_of(window)
    finite = np.isfinite(difference)
    if not finite.all():
        step = int(window.steps[int(np.argmin(finite))])
        return invalid(f"the {signal.replace('_', ' ')} cannot be compared at step {step}", step)
    found = equivalence(difference, limit.value, rounding=printed, one_sided=True)
    first, last = int(window.steps[0]), int(window.steps[-1])
    return CheckResult(
        OUTCOMES[found.outcome],
        f"mean difference of the {signal.replace('_', ' ')} {found.mean:+.2g} ± "
        f"{found.half_width:.1g} over steps {first} to {last}, {found.end:+.2g} ± "
        f"{found.end_half_width:.1g} at their end, of one seed{outlook(found, window, limit)}",
        measured=max(found.bound, 0.0),
        limit=limit,
        unit="relative",
        steps=(first, last),
    )


def _sides(seeds: SeedRuns) -> Iterator[tuple[str, tuple[Evidence, ...]]]:
    yield "the control", seeds.control
    yield "the test set", seeds.test


def _noise(loss: Floats) -> float:
    """Standard deviation of a curve's noise from step to step, by its second differences."""
    return float(np.median(np.abs(np.diff(loss, 2)))) / 0.6745 / math.sqrt(6)


def _same_seed(first: Evidence, second: Evidence) -> str:
    """Why two runs of a side are one seed, as the end of a sentence; empty where they are two."""
    ours, theirs = series(first, "loss"), series(second, "loss")
    steps = np.intersect1d(ours.steps, theirs.steps)
    if not steps.size:
        return ""
    mine, other = (each.values[np.searchsorted(each.steps, steps)] for each in (ours, theirs))
    if np.array_equal(mine, other, equal_nan=True):
        return "have the same loss to the last bit at all steps"
    magnitude = np.maximum(np.abs(mine), np.abs(other))
    printed = rounding_of(first, "loss", mine) + rounding_of(second, "loss", mine)
    # Two seeds may print alike for a few steps, but not for many, unless all noise is rounded off.
    coarse = bool(np.any(printed[:START] > SAME_START * magnitude[:START]))
    if coarse and (steps.size < PRINTED_START or _noise(mine) < np.max(printed)):
        return ""
    start = slice(PRINTED_START if coarse else START)
    if np.all((np.abs(mine - other) <= SAME_START * magnitude + printed)[start]):
        same = counted(mine[start].size, "step")
        return f"have the same loss except for rounding at their first {same}"
    return ""


class _Reached(NamedTuple):
    """When the seeds of one side reach the target."""

    steps: Floats
    """Shape (seeds,): the step of reaching it; the last step of a seed that does not."""
    never: tuple[str, ...]
    """Names of the seeds that do not reach it."""
    left: tuple[str, ...]
    """Names of those that reach it and end above it."""
    began_there: tuple[str, ...]
    """Names of those that are at it at their first point: the curves do not show when it was."""
    within: float
    """The most steps between the points before and after reaching it, of all seeds."""


@check(Tier.EQUIVALENCE)
def target_no_later(
    seeds: SeedRuns | None, target: float | None, margin: float | None
) -> CheckResult:
    """The target loss is reached in no more steps than the control's seeds need, by the margin.

    A one-sided test of the step that reaches it: the first at or below the target after which the
    median of the next points is, too; for a seed that ends above it, the last. Sooner is fine. Both
    sides are expected to log losses of about the same noise: noise crosses a target early.
    """
    if seeds is None or target is None or margin is None:
        return invalid("no seeds, no target or no margin to compare by")
    control, test = (_reached(runs, target) for runs in (seeds.control, seeds.test))
    if unfit := _target_unfit(seeds, control, test, target):
        return invalid(unfit)
    limit = Limit(margin, "margin set in the file")
    within = max(control.within, test.within)
    groups = Group.of(test.steps), Group.of(control.steps)
    # Steps between two logged ones are not seen: each side may be late by up to one distance.
    rounding = within / max(float(control.steps.min()), 1.0)
    found = over_seeds(*groups, margin, one_sided=True, rounding=rounding)
    outcome = OUTCOMES[found.outcome]
    if outcome is Outcome.INCONCLUSIVE and rounding >= margin:
        return CheckResult(
            outcome,
            f"the distance of logged points, {counted(int(within), 'step')}, is {rounding:.2g} of "
            f"the {control.steps.min():,.0f} that a control needs to reach {target:g}, and the "
            f"margin is {margin:g}: log more often, or give a larger margin",
            limit=limit,
            unit="relative",
        )
    short = _never(test, target)
    if short and outcome is not Outcome.FAIL:
        # Its number of steps is only known to be larger: it can only raise the mean.
        outcome = Outcome.INCONCLUSIVE
    return CheckResult(
        outcome,
        f"loss {target:g} after {groups[0].mean:,.4g} steps, the mean of {len(seeds.test)} seeds, "
        f"and {groups[1].mean:,.4g} in the control's {len(seeds.control)}: "
        f"{found.difference:+.2g} ± {found.half_width:.1g}"
        + (
            short
            or ("" if found.outcome is not Answer.INCONCLUSIVE else _target_outlook(found, margin))
        ),
        measured=max(found.bound, 0.0),
        limit=limit,
        unit="relative",
        further_seeds=None if short else found.further_seeds,
    )


TARGET_CHECKS: tuple[Question, ...] = (target_no_later,)


def _target_unfit(seeds: SeedRuns, control: _Reached, test: _Reached, target: float) -> str:
    """Why the curves do not show when the target is reached, in a clause; empty if they do."""
    if min(len(seeds.test), len(seeds.control)) < FEWEST_SEEDS:
        return f"fewer than {FEWEST_SEEDS} seeds on one side"
    start = seeds.control[0].steps[0]
    for each in (*seeds.control, *seeds.test):
        # A run may end where it reached the target; a gap may hide when it did.
        if broken := torn(each):
            return broken
        if each.steps[0] != start:
            return (
                f"{each.name} begins at step {each.steps[0]} and {seeds.control[0].name} at step "
                f"{start}: give all from the same step"
            )
    for name in (*control.never, *control.left):
        how = "never reaches" if name in control.never else "reaches and leaves again"
        return (
            f"the {control_called(name)} {how} a loss of {target:g}: set a target that every run "
            "of the control reaches and stays at"
        )
    for name in (*control.began_there, *test.began_there):
        return (
            f"{name} is at a loss of {target:g} at its first point already, so it does not show "
            "when it got there: set a lower target, or give the curve from its start"
        )
    return ""


def _reached(runs: tuple[Evidence, ...], target: float) -> _Reached:
    steps: list[float] = []
    within = 1
    never, left, began_there = [], [], []
    for run in runs:
        curve = series(run, "loss")
        at = _first_below(curve.values, target)
        if at is None:
            never.append(run.name)
        elif at == 0:
            began_there.append(run.name)
        elif not np.median(curve.values[max(at, curve.values.size - _END) :]) <= target:
            left.append(run.name)
            at = None
        if at:
            within = max(within, int(curve.steps[at] - curve.steps[at - 1]))
        last = curve.steps.size - 1
        steps.append(float(curve.steps[last if at is None else at]) if curve.steps.size else 0.0)
    return _Reached(np.array(steps), tuple(never), tuple(left), tuple(began_there), within)


_AFTER = 5
"""Points whose median has to be at or below a target: one of them may be a glitch of the log."""
_END = 15
"""Points at the end whose median has to be: a run that diverges later has reached nothing."""


def _first_below(loss: Floats, target: float) -> int | None:
    """Index of the first point that is below, and not by itself alone; None without one."""
    for index in np.flatnonzero(loss <= target):
        if np.median(loss[index : index + _AFTER]) <= target:
            return int(index)
    return None


def _never(test: _Reached, target: float) -> str:
    """A note on seeds that do not reach the target, or do not stay there."""
    never = f"; {', '.join(test.never)} never below {target:g}" if test.never else ""
    left = f"; {', '.join(test.left)} above it again at the end" if test.left else ""
    if not never and not left:
        return ""
    return f"{never}{left}, counted with their last step: longer runs would show when"


def _target_outlook(found: OverSeeds, margin: float) -> str:
    if found.further_seeds is None:
        return (
            f"; too near the margin of {margin:g} to say how many further seeds would settle it, "
            f"or more than {MOST_SEEDS:,}"
        )
    return (
        f"; about {counted(found.further_seeds, 'further seed')} per side would settle it with a "
        "probability of 80%"
    )
