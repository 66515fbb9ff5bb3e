"""Random numbers that start over or that ranks share are named, and nothing else is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_examples import STEPS, judge, run, spec, with_signals
from resume_examples import ELASTIC, ELASTIC_PASSES, ELASTIC_SPEC, state

from converge_harness.judge.checks.resume import badly_continued
from converge_harness.judge.compare.random_states import DrawnAgain, parted, repeated, shared
from converge_harness.model import CauseClass, Judgement, Outcome, RestartOwner

OWN = tuple(f"{step:016x}" for step in range(1, STEPS + 1))
"""A state of its own before every step."""
RESUMED = 9
AGAIN = OWN[: RESUMED - 1] + OWN[: STEPS - RESUMED + 1]
OTHER = OWN[: RESUMED - 1] + tuple(f"{step:016x}" for step in range(900, 901 + STEPS - RESUMED))
NOTHING = ("",) * STEPS
ONCE = ("aa", *[""] * (RESUMED - 2), "aa", *[""] * (STEPS - RESUMED))
"""A loader draws a seed where a process takes its first batch."""
NAME = "random-numbers-go-on"


def drawn(evidence, states, *, alike=None):
    ranks = (alike,) * len(states)
    return replace(evidence, random_states=states, random_shared=ranks)


def judged(states, control=OWN, *, test=None, alike=None, control_alike=None):
    return judge(
        drawn(test or run("test"), states, alike=alike),
        drawn(run("control"), control, alike=control_alike),
        spec=spec(),
        control_spec=spec(),
    )


def answer(verdict, name=NAME):
    return next(check for check in verdict.checks if check.name == name)


def later_loss(change, since=RESUMED):
    def off(step, value):
        return change * value if step >= since else value

    return with_signals(run("test"), loss=off, loss_recomputed=off)


def test_random_numbers_that_start_over_fail_though_every_curve_agrees():
    verdict = judged(AGAIN)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is CauseClass.STATE
    assert verdict.cause.startswith(
        "the random numbers (RNG) start over at step 9: the generators are as they were before "
        "step 1"
    )
    assert "torch.get_rng_state()" in verdict.look_at
    assert answer(verdict).onset == RESUMED


RIGHT = {
    "go on": (OWN, OWN, Outcome.PASS),
    "none drawn": (NOTHING, NOTHING, Outcome.PASS),
    "a loader's seed at every start": (ONCE, ("aa", *[""] * (STEPS - 1)), Outcome.PASS),
    "seeded anew by both": (AGAIN, AGAIN, Outcome.PASS),
    "seeded anew with another seed": (OTHER, OWN, Outcome.PASS),
    "a control that draws nothing": (AGAIN, NOTHING, Outcome.PASS),
    "an older test": ((), OWN, Outcome.SKIPPED),
    "an older control": (AGAIN, (), Outcome.SKIPPED),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_no_start_over_is_not_called_one(case):
    states, control, outcome = RIGHT[case]
    verdict = judged(states, control)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert answer(verdict).outcome is outcome, answer(verdict).detail


def test_a_step_without_a_record_is_invalid():
    verdict = judged((*OWN[:5], None, *OWN[6:]))
    assert answer(verdict).outcome is Outcome.INVALID
    assert answer(verdict).detail == "test does not record what it drew in step 6"
    assert verdict.judgement is Judgement.INVALID


def test_other_random_numbers_are_the_cause_of_what_differs_from_there_on():
    wrong = judged(OTHER, test=later_loss(1.5))
    assert wrong.judgement is Judgement.FAIL
    assert wrong.cause_class is CauseClass.STATE
    assert "the random numbers (RNG) are others than the control's from step 9 on" in wrong.cause
    earlier = judged(OTHER, test=later_loss(1.5, since=5))
    assert "RNG" not in earlier.cause
    drawn_otherwise = tuple(f"{step:016x}" for step in range(900, 900 + STEPS))
    never_the_same = judged(drawn_otherwise, test=later_loss(1.5))
    assert "RNG" not in never_the_same.cause


def test_ranks_that_drop_the_same_units_fail_where_those_of_the_control_do_not():
    verdict = judged(OWN, alike=True, control_alike=False)
    assert verdict.judgement is Judgement.FAIL
    assert "so all of them drop the same units" in verdict.cause
    assert "ranks that share samples (TP) the same seed" in verdict.look_at
    for ours, theirs in (
        (False, False),
        (True, True),  # Megatron-LM and torchtitan seed so
        (False, True),
        (None, False),  # on one data-parallel rank nothing is shared
        (True, None),
    ):
        right = judged(OWN, alike=ours, control_alike=theirs)
        assert right.judgement is Judgement.PASS, (ours, theirs, right.cause)
        assert answer(right, "ranks-draw-apart").outcome is Outcome.PASS
    once = judged(ONCE, ONCE, alike=True, control_alike=False)
    assert once.judgement is Judgement.PASS, once.cause


def test_a_resume_is_named_with_what_its_load_restored():
    first, second, third = ELASTIC_PASSES
    second = replace(second, loaded=state(8, random_states=("c", "d")))
    first = replace(first, saved=(state(8, random_states=("a", "b")),))
    test = replace(ELASTIC, passes=(first, second, third))
    verdict = judge(
        drawn(test, AGAIN), drawn(run("control"), OWN), spec=ELASTIC_SPEC, control_spec=spec()
    )
    assert verdict.judgement is Judgement.FAIL
    assert "start over at step 9" in verdict.cause
    assert "step 9 is part of pass 2, which loads step 8" in verdict.cause
    assert "the generators of 2 of 2 ranks are not in the states saved" in verdict.cause


def test_a_control_that_was_continued_with_its_first_random_numbers_is_no_control():
    first, second, _ = ELASTIC_PASSES
    passes = (first, replace(second, in_force=first.in_force))
    control = replace(ELASTIC, passes=passes, restarts=RestartOwner.USER)
    assert badly_continued(drawn(control, OWN)) is None
    flaw = badly_continued(drawn(control, AGAIN))
    assert flaw is not None
    assert (flaw.step, "draws the random numbers of step 1 again" in flaw.what) == (9, True)
    # Seeded anew at a step that is no resume: as the program means it.
    assert badly_continued(drawn(control, OWN[:4] + OWN[: STEPS - 4])) is None


states = st.lists(st.sampled_from(["", *"abcdef"]), min_size=1, max_size=STEPS)


@given(states, states)
def test_a_repeat_is_two_steps_that_the_run_has_drawn_and_the_control_has_not(mine, theirs):
    def of(found):
        return drawn(run("r", steps=tuple(range(1, len(found) + 1))), tuple(found), alike=True)

    test, control = of(mine), of(theirs)
    assert repeated(control, control) is None
    assert parted(control, control) is None
    assert all(mine[step - 1] and mine[step] for step in shared(test))
    found = repeated(test, control)
    if found is not None:
        step, earlier = found
        assert earlier < step
        assert mine[step - 1] == mine[earlier - 1]
        assert mine[step] in (mine[earlier], *theirs[earlier : earlier + 1])
        assert "" not in mine[step - 1 : step + 1]
        assert theirs[step - 1] != theirs[earlier - 1]


@given(st.integers(2, STEPS - 1), st.integers(1, STEPS - 1))
def test_starting_over_is_found_wherever_two_steps_follow(resumed, length):
    others = tuple(f"{step:x} seeded anew" for step in range(STEPS))
    again = (OWN[: resumed - 1] + OWN[:length] + others)[:STEPS]
    found = repeated(drawn(run("t"), again), drawn(run("c"), OWN))
    assert found == (DrawnAgain(resumed, 1) if length > 1 else None)
