"""Curves whose losses are means over several steps: compared with means over the same steps."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import judge

from converge_harness.judge import calibrate
from converge_harness.model import Evidence, Judgement

EVERY = 5
LOSS = 2.0 + 5.0 * np.exp(-np.arange(1, 61) / 12)


def logged(name, *, every=EVERY, over=0, loss=LOSS, first=False):
    """What a logger prints at every n-th step: the mean since it last printed."""
    ends = [*([1] if first else []), *range(every, loss.size + 1, every)]
    begins = [0, *ends[:-1]]
    means = [loss[begin:end].mean() for begin, end in zip(begins, ends, strict=True)]
    return Evidence(name, f"{name}.json", ends, {"loss": means}, mean_over=over)


CONTROL = logged("control")


def limits(control=CONTROL, **more):
    return calibrate(control, [logged("rerun", **more)])


def test_means_over_the_same_steps_are_compared():
    calibration = limits()
    assert not calibration.problems
    assert judge(logged("test"), CONTROL, calibration).judgement is Judgement.PASS
    wrong = LOSS.copy()
    wrong[30:] *= 1.05
    verdict = judge(logged("test", loss=wrong), CONTROL, calibration)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.onset_step == 35  # the row that has step 31
    spike = LOSS.copy()
    spike[41] *= 3  # at one step of five
    assert judge(logged("test", loss=spike), CONTROL, calibration).judgement is Judgement.FAIL


@pytest.mark.parametrize(
    ("test", "control"),
    [
        (logged("test", every=10), CONTROL),
        (logged("test", every=10, over=10), replace(CONTROL, mean_over=EVERY)),
        (logged("test"), Evidence("c", "c", np.arange(1, 61), {"loss": LOSS})),
        (Evidence("test", "t", np.arange(1, 61), {"loss": LOSS}), CONTROL),
        (logged("test", over=10), CONTROL),
    ],
)
def test_means_over_other_steps_are_refused(test, control):
    verdict = judge(test, control)
    assert verdict.judgement is Judgement.INVALID
    assert "test has another mean at step " in verdict.cause
    assert "; log both at the same interval" in verdict.cause


def test_a_repeat_of_other_means_gives_no_limits():
    (problem,) = limits(over=10).problems
    assert "the repeat rerun has another mean at step 10: its loss is over the last 10" in problem


def test_the_same_means_may_be_declared_in_several_ways():
    since, last = CONTROL, replace(CONTROL, mean_over=EVERY)
    unsaid = replace(CONTROL, mean_over=1)  # of another format, with the same rows
    for test, control in ((last, since), (since, last), (unsaid, since), (since, unsaid)):
        named = replace(test, name="test")
        verdict = judge(named, control, calibrate(control, [replace(control, name="r")]))
        assert verdict.judgement is Judgement.PASS, verdict.cause


def test_a_first_row_of_its_own_is_counted():
    test, control = logged("test", first=True), logged("control", first=True)
    calibration = calibrate(control, [replace(control, name="r")])
    assert judge(test, control, calibration).judgement is Judgement.PASS
    # Row 5 is over 4 steps in one, over 5 in the other; it is the first that both have.
    assert judge(test, CONTROL).judgement is not Judgement.PASS
