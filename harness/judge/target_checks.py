"""How many steps the seeds of two sides need to reach a target loss.

The form in which MLPerf Training states convergence: not how low a loss is at a step, but when it
is there. Each seed gives one number, so the statistics are those of :mod:`harness.judge.seeds`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.judge.check import Finding, Question, check, counted, invalid
from harness.judge.curves import series
from harness.judge.equivalence import OUTCOMES
from harness.judge.grid import spacing
from harness.judge.seeds import FEWEST_SEEDS, MOST_SEEDS, Group, over_seeds
from harness.judge.tost import Answer
from harness.model import Evidence, Floats, Limit, Outcome, SeedRuns, Tier


class _Reached(NamedTuple):
    """When the seeds of one side reach the target."""

    steps: Floats
    """Shape (seeds,): the first step at or below it; the last step of a seed that never is."""
    never: tuple[str, ...]
    """Names of the seeds that do not reach it."""


@check(Tier.EQUIVALENCE)
def target_no_later(seeds: SeedRuns | None, target: float | None, margin: float | None) -> Finding:
    """The target loss is reached in no more steps than the control's seeds need, by the margin.

    A one-sided test of the first step at which the loss is at or below the target; sooner will do.
    Both sides are expected to log losses that are about as noisy: noise crosses a target early.
    """
    if seeds is None or target is None or margin is None:
        return invalid("no seeds, no target or no margin to compare by")
    if min(len(seeds.test), len(seeds.control)) < FEWEST_SEEDS:
        return invalid(f"fewer than {FEWEST_SEEDS} seeds on one side")
    control, test = (_reached(runs, target) for runs in (seeds.control, seeds.test))
    if control.never:
        return invalid(
            f"the control {control.never[0]} never reaches a loss of {target:g}: set a target that "
            "every run of the control reaches"
        )
    limit = Limit(margin, "margin set in the file")
    grid = max(spacing(series(each, "loss").steps) for each in (*seeds.control, *seeds.test))
    groups = Group.of(test.steps), Group.of(control.steps)
    # A step between two logged ones is not seen: each side is late by up to one distance.
    found = over_seeds(
        *groups, margin, one_sided=True, rounding=grid / max(float(control.steps.min()), 1.0)
    )
    outcome = OUTCOMES[found.outcome]
    if test.never and outcome is not Outcome.FAIL:
        # Its number of steps is only known to be larger: it may raise the mean, and lowers nothing.
        outcome = Outcome.INCONCLUSIVE
    return Finding(
        outcome,
        f"loss {target:g} after {groups[0].mean:,.4g} steps, the mean of {len(seeds.test)} seeds, "
        f"and {groups[1].mean:,.4g} in the control's {len(seeds.control)}: "
        f"{found.difference:+.2g} ± {found.half_width:.1g}"
        + _never(test, target)
        + ("" if found.outcome is not Answer.INCONCLUSIVE else _outlook(found.further_seeds)),
        measured=max(found.bound, 0.0),
        limit=limit,
        unit="relative",
    )


CHECKS: tuple[Question, ...] = (target_no_later,)


def _reached(runs: tuple[Evidence, ...], target: float) -> _Reached:
    steps, never = [], []
    for run in runs:
        curve = series(run, "loss")
        at = np.flatnonzero(curve.values <= target)
        if not at.size:
            never.append(run.name)
        first = int(at[0]) if at.size else -1
        steps.append(float(curve.steps[first]) if curve.steps.size else 0.0)
    return _Reached(np.array(steps), tuple(never))


def _never(test: _Reached, target: float) -> str:
    if not test.never:
        return ""
    return (
        f"; {', '.join(test.never)} never below {target:g}, counted with the last step that is "
        "there: longer runs would tell"
    )


def _outlook(further: int | None) -> str:
    if further is None:
        return f"; too near the margin to say how many further seeds, or more than {MOST_SEEDS:,}"
    return (
        f"; about {counted(further, 'further seed')} a side would settle it with a probability of "
        "80%"
    )
