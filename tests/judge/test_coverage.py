"""Curves from elsewhere on different grids: judged at common steps, if those cover both."""

import numpy as np
import pytest
from judge_examples import judge

from converge_harness.model import Evidence, Judgement, Outcome


def curve(steps):
    steps = np.array(steps)
    return Evidence("c", "c.csv", steps, {"loss": 8.0 * steps**-0.1})


def coverage(test, control):
    verdict = judge(curve(test), curve(control))
    return verdict, next(check for check in verdict.checks if check.name == "same-steps")


EVERY = range(1, 1001)


TENTH = range(10, 1001, 10)
SEVENTH = range(1, 1001, 7)


@pytest.mark.parametrize("control", [TENTH, SEVENTH], ids=["every 10th", "every 7th"])
def test_a_control_with_fewer_steps_is_judged_at_all_of_its_own(control):
    verdict, check = coverage(EVERY, control)
    assert verdict.judgement is Judgement.PASS
    assert check.detail.startswith(f"judged at {len(control)} common steps")


def test_of_two_coarse_grids_the_coarser_one_counts():
    for test, control in ((range(20, 1001, 20), TENTH), (TENTH, range(20, 1001, 20))):
        verdict, check = coverage(test, control)
        assert verdict.judgement is Judgement.PASS
        assert check.detail.startswith("judged at 50 common steps")


@pytest.mark.parametrize("test", [TENTH, SEVENTH, [1, 335, 669], [2**n for n in range(10)]])
def test_a_control_that_has_every_step_demands_every_step(test):
    verdict, check = coverage(test, EVERY)
    assert (verdict.judgement, check.outcome) == (Judgement.INVALID, Outcome.INVALID)
    assert f"no step between {test[1] if test[1] == 2 else test[0]} and" in verdict.cause


def test_a_control_that_ends_early_is_undecided():
    """Powers of two end at 512 of 1,000: of what came after nobody saw anything."""
    verdict, _ = coverage(EVERY, [2**n for n in range(10)])
    assert verdict.judgement is Judgement.INVALID
    assert "only steps 1 to 512 are in both" in verdict.cause


@pytest.mark.parametrize(
    "grid",
    [
        EVERY,
        range(7, 90),
        [1, *range(5, 101, 5)],
        [1, *range(50, 1000, 50), 997],
        [5, 500],
        [1, 5, 10],
    ],
    ids=["every", "from 7", "Megatron", "first, every 50th, last", "two", "three"],
)
def test_a_regular_grid_has_no_hole(grid):
    verdict, check = coverage(grid, grid)
    assert (verdict.judgement, check.outcome) == (Judgement.PASS, Outcome.PASS)


HOLES = {
    "middle third": ([*range(1, 21), *range(41, 61)], "lacks steps 21 to 40"),
    "32 in a row": ([*range(1, 15), *range(47, 61)], "lacks steps 15 to 46"),
    "one step": ([*range(1, 30), *range(31, 61)], "lacks step 30, where it has every step"),
    "the second": ([1, *range(3, 61)], "lacks step 2"),
    "the last but one": ([*range(1, 59), 60], "lacks step 59"),
    "two in three": ([step for step in range(1, 61) if step % 3], "lacks step 3"),
    "one in ten": (
        [*range(10, 200, 10), *range(220, 600, 10)],
        "lacks steps 200 to 210, where it has one",
    ),
}


@pytest.mark.parametrize("case", HOLES)
def test_a_hole_is_invalid_and_named_whichever_side_has_it(case):
    steps, words = HOLES[case]
    whole = range(steps[0], steps[-1] + 1)
    for test, control in ((steps, whole), (whole, steps), (steps, steps)):
        verdict, check = coverage(test, control)
        assert (verdict.judgement, check.outcome) == (Judgement.INVALID, Outcome.INVALID)
        assert words in verdict.cause


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
