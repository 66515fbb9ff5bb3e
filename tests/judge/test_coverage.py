"""Curves from elsewhere on different grids: judged at common steps, if those cover both."""

import numpy as np
import pytest

from harness.judge import judge
from harness.model import Evidence, Judgement, Outcome


def curve(steps):
    steps = np.array(steps)
    return Evidence("c", "c.csv", steps, {"loss": 8.0 * steps**-0.1})


def coverage(test, control):
    verdict = judge(curve(test), curve(control))
    return verdict, next(check for check in verdict.checks if check.name == "same-steps")


EVERY = range(1, 1001)


@pytest.mark.parametrize(
    "coarse",
    [range(10, 1001, 10), range(1, 1001, 7), [2**n for n in range(10)]],
    ids=["every 10th", "every 7th", "powers of two"],
)
def test_a_coarser_grid_is_judged_at_its_steps_whichever_side_has_it(coarse):
    for test, control in ((coarse, EVERY), (EVERY, coarse)):
        verdict, check = coverage(test, control)
        assert verdict.judgement is Judgement.PASS
        assert check.detail.startswith(f"judged at {len(coarse)} common steps")


@pytest.mark.parametrize(
    "broken",
    [
        range(10, 951, 10),
        range(100, 1001, 10),
        [*range(1, 51), *range(951, 1001)],
        [1, 1000],
        range(5, 1001, 1000),
        [step + 5000 for step in EVERY],
    ],
    ids=["ends early", "begins late", "hole", "two points", "one point", "elsewhere"],
)
def test_what_does_not_cover_the_other_curve_is_invalid(broken):
    for test, control in ((broken, EVERY), (EVERY, broken)):
        verdict, check = coverage(test, control)
        assert verdict.judgement is Judgement.INVALID
        assert check.outcome is Outcome.INVALID
