"""Curves that agree because nothing was trained, or nothing compared, never pass."""

import pytest
from judge_examples import LOSSES, NORMS, STEPS, foreign, judge, run, spec, with_signals

from converge_harness.model import Judgement, Outcome

RATE = (1e-3,) * STEPS


def asked(test, control, **more):
    verdict = judge(test, control, **more)
    return verdict, next(each for each in verdict.checks if each.name == "something-trained")


def test_two_runs_that_learn_are_compared():
    control = foreign("a", loss=LOSSES, grad_norm=NORMS, lr=RATE)
    verdict, check = asked(foreign("b", loss=LOSSES, grad_norm=NORMS, lr=RATE), control)
    assert (verdict.judgement, check.outcome) == (Judgement.PASS, Outcome.PASS)
    # A warm-up that starts from nothing, and a loss that stands still for a while, are training.
    slow = {"loss": (8.0, 8.0, *LOSSES[2:]), "lr": (0.0, *RATE[1:])}
    verdict, check = asked(foreign("b", **slow), foreign("a", **slow))
    assert (verdict.judgement, check.outcome) == (Judgement.PASS, Outcome.PASS)


NOTHING = {
    "lr of 0": ({"loss": LOSSES, "lr": (0.0,) * STEPS}, "learning rate of the control a is 0"),
    "losses of 0": ({"loss": (0.0,) * STEPS}, "loss of the control a is 0 at all 20 steps"),
    "one loss": ({"loss": (8.3,) * STEPS, "grad_norm": NORMS}, "is 8.3 at all 20 steps"),
    "gradients of 0": ({"loss": LOSSES, "grad_norm": (0.0,) * STEPS}, "grad norm of the control"),
    "one point": ({"loss": LOSSES[:1]}, "the loss of a single step"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_stands_still_on_both_sides_is_invalid(case):
    signals, words = NOTHING[case]
    verdict, check = asked(foreign("b", **signals), foreign("a", **signals))
    assert (verdict.judgement, check.outcome) == (Judgement.INVALID, Outcome.INVALID)
    assert words in verdict.cause


def test_a_run_of_ours_that_stands_still_is_invalid_too():
    still = with_signals(run(), loss=lambda *_: 8.0, loss_recomputed=lambda *_: 8.0)
    verdict, _ = asked(still, still, spec=spec(), control_spec=spec())
    assert verdict.judgement is Judgement.INVALID
    assert "nothing was trained" in verdict.cause


def test_a_test_set_alone_that_stands_still_fails():
    still = foreign("b", loss=(LOSSES[0],) * STEPS)
    verdict, check = asked(still, foreign("a", loss=LOSSES))
    assert check.outcome is Outcome.PASS
    assert verdict.judgement is not Judgement.PASS


def test_a_test_set_that_alone_says_its_rate_is_0_is_invalid():
    still = foreign("b", loss=LOSSES, lr=(0.0,) * STEPS)
    verdict, _ = asked(still, foreign("a", loss=LOSSES))
    assert verdict.judgement is Judgement.INVALID
    assert "the learning rate of b is 0 at every step" in verdict.cause
    # Against a control that has a rate it is a wrong rate, which is said as such.
    verdict, check = asked(still, foreign("a", loss=LOSSES, lr=RATE))
    assert check.outcome is Outcome.PASS
    assert verdict.judgement is not Judgement.PASS


def test_one_path_is_no_comparison():
    curve = foreign("a", loss=LOSSES)
    verdict, check = asked(curve, curve, one_path=True)
    assert (verdict.judgement, check.outcome) == (Judgement.INVALID, Outcome.INVALID)
    assert "one and the same path (a.csv)" in verdict.cause
