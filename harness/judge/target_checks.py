"""How many steps the seeds of two sides need to reach a target loss.

The form in which MLPerf Training states convergence: not how low a loss is at a step, but when it
is there. Each seed gives one number, so the statistics are those of :mod:`harness.judge.seeds`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.judge.check import Finding, Question, check, counted, invalid
from harness.judge.comparability import torn
from harness.judge.curves import series
from harness.judge.equivalence import OUTCOMES
from harness.judge.seeds import FEWEST_SEEDS, MOST_SEEDS, Group, OverSeeds, over_seeds
from harness.judge.tost import Answer
from harness.model import Evidence, Floats, Limit, Outcome, SeedRuns, Tier


class _Reached(NamedTuple):
    """When the seeds of one side reach the target."""

    steps: Floats
    """Shape (seeds,): the step of reaching it; the last step of a seed that does not."""
    never: tuple[str, ...]
    """Names of the seeds that do not reach it."""
    left: tuple[str, ...]
    """Names of those that reach it and end above it."""
    began_there: tuple[str, ...]
    """Names of those that are there at their first point: nobody saw them reach it."""
    within: float
    """The most steps between the points before and after reaching it, of all seeds."""


@check(Tier.EQUIVALENCE)
def target_no_later(seeds: SeedRuns | None, target: float | None, margin: float | None) -> Finding:
    """The target loss is reached in no more steps than the control's seeds need, by the margin.

    A one-sided test of the step that reaches it: the first at or below the target of which the next
    points are, too, by their median; of a seed that ends above it, the last. Sooner will do. Both
    sides are expected to log losses that are about as noisy: noise crosses a target early.
    """
    if seeds is None or target is None or margin is None:
        return invalid("no seeds, no target or no margin to compare by")
    control, test = (_reached(runs, target) for runs in (seeds.control, seeds.test))
    if unfit := _unfit(seeds, control, test, target):
        return invalid(unfit)
    limit = Limit(margin, "margin set in the file")
    within = max(control.within, test.within)
    groups = Group.of(test.steps), Group.of(control.steps)
    # A step between two logged ones is not seen: each side is late by up to one distance.
    rounding = within / max(float(control.steps.min()), 1.0)
    found = over_seeds(*groups, margin, one_sided=True, rounding=rounding)
    outcome = OUTCOMES[found.outcome]
    if outcome is Outcome.INCONCLUSIVE and rounding >= margin:
        return Finding(
            outcome,
            f"the distance of logged points, {counted(int(within), 'step')}, is {rounding:.2g} of "
            f"the {control.steps.min():,.0f} that a control needs to reach {target:g}, and the "
            f"margin is {margin:g}: log more often, or give a larger margin",
            limit=limit,
            unit="relative",
        )
    if (test.never or test.left) and outcome is not Outcome.FAIL:
        # Its number of steps is only known to be larger: it may raise the mean, and lowers nothing.
        outcome = Outcome.INCONCLUSIVE
    return Finding(
        outcome,
        f"loss {target:g} after {groups[0].mean:,.4g} steps, the mean of {len(seeds.test)} seeds, "
        f"and {groups[1].mean:,.4g} in the control's {len(seeds.control)}: "
        f"{found.difference:+.2g} ± {found.half_width:.1g}"
        + (
            _never(test, target)
            or ("" if found.outcome is not Answer.INCONCLUSIVE else _outlook(found, margin))
        ),
        measured=max(found.bound, 0.0),
        limit=limit,
        unit="relative",
    )


CHECKS: tuple[Question, ...] = (target_no_later,)


def _unfit(seeds: SeedRuns, control: _Reached, test: _Reached, target: float) -> str:
    """Why the curves do not show when the target is reached, in a clause; empty if they do."""
    if min(len(seeds.test), len(seeds.control)) < FEWEST_SEEDS:
        return f"fewer than {FEWEST_SEEDS} seeds on one side"
    start = seeds.control[0].steps[0]
    for each in (*seeds.control, *seeds.test):
        # A run may end where it reached the target; a hole may hide where it did.
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
            f"the control {name} {how} a loss of {target:g}: set a target that every run of the "
            "control reaches and stays at"
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
    """Index of the first point that is below for more than itself; None without one."""
    for index in np.flatnonzero(loss <= target):
        if np.median(loss[index : index + _AFTER]) <= target:
            return int(index)
    return None


def _never(test: _Reached, target: float) -> str:
    """What is to be known of seeds that do not reach the target, or do not stay there."""
    never = f"; {', '.join(test.never)} never below {target:g}" if test.never else ""
    left = f"; {', '.join(test.left)} above it again at the end" if test.left else ""
    if not never and not left:
        return ""
    return f"{never}{left}, counted with the last step that is there: longer runs would tell"


def _outlook(found: OverSeeds, margin: float) -> str:
    if found.further_seeds is None:
        return (
            f"; too near the margin of {margin:g} to say how many further seeds would settle it, "
            f"or more than {MOST_SEEDS:,}"
        )
    return (
        f"; about {counted(found.further_seeds, 'further seed')} a side would settle it with a "
        "probability of 80%"
    )
