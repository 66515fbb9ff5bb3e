"""Curves whose losses are means over several steps: compared with means over the same steps."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import judge

from converge_harness.judge import calibrate
from converge_harness.judge.soundness import other_means
from converge_harness.model import Column, Evidence, Judgement, SeedRuns

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
@pytest.mark.parametrize("repeats", [0, 2])
def test_means_over_other_steps_are_refused(test, control, repeats):
    found = calibrate(control, [replace(control, name=f"r{n}") for n in range(repeats)])
    verdict = judge(test, control, found if repeats else None)
    assert verdict.judgement is Judgement.INVALID
    assert "test logs at step " in verdict.cause
    assert "; log both at the same interval" in verdict.cause


@pytest.mark.parametrize("question", [{}, {"target": 3.0, "margin": 0.05}])
def test_of_several_seeds_each_needs_the_same_means(question):
    losses = [LOSS + np.random.default_rng(seed).normal(0, 0.02, LOSS.size) for seed in range(12)]
    seeds = {"every": 5, "first": True}
    controls = tuple(logged(f"c{n}", loss=loss, **seeds) for n, loss in enumerate(losses[:6]))
    same = tuple(logged(f"t{n}", loss=loss, **seeds) for n, loss in enumerate(losses[6:]))
    every_step = Evidence("t3", "t3", np.arange(1, 61), {"loss": losses[9]})
    other = (*same[:3], every_step, *same[4:])
    for found, words in ((same, ""), (other, "t3 logs at step 5 the mean loss of that step alone")):
        runs = SeedRuns(controls, found)
        verdict = judge(found[0], controls[0], seeds=runs, same_seed=False, **question)
        assert words in verdict.cause
        assert (verdict.judgement is Judgement.INVALID) is bool(words), verdict.cause


def test_steps_out_of_order_are_another_check_s():
    steps = CONTROL.steps.copy()
    steps[[2, 3]] = steps[[3, 2]]
    verdict = judge(replace(CONTROL, name="test", steps=steps), CONTROL, limits())
    assert verdict.judgement is Judgement.INVALID
    assert "has step 15 after step 20" in verdict.cause


def test_a_repeat_of_other_means_gives_no_limits():
    (problem,) = limits(over=10).problems
    assert "the repeat rerun logs at step 10 the mean loss of the last 10 steps" in problem


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
    verdict = judge(test, CONTROL, limits())
    assert verdict.judgement is Judgement.INVALID
    assert "at step 5 the mean loss of the last 4 steps, its control that of" in verdict.cause


def test_what_the_first_row_of_a_later_log_is_a_mean_of_is_not_known():
    late = replace(
        CONTROL,
        name="test",
        steps=CONTROL.steps[3:],
        signals={"loss": Column.of(CONTROL.signals["loss"].values[3:])},
    )
    assert other_means(late, CONTROL) is None
    assert other_means(CONTROL, late) is None
