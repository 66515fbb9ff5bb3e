"""What judging compares of two runs, and returns beside the verdict."""

from dataclasses import replace

import numpy as np
import pytest
from judge_examples import STEPS, run, spec, with_signals

from converge_harness.judge import calibrate, compare_runs
from converge_harness.judge import judge as judge_pair
from converge_harness.model import JUDGED_SIGNALS

CONTROL = run()


def noisy(name, size=1e-6):
    draw = np.random.default_rng(len(name))
    return with_signals(
        run(name),
        **dict.fromkeys(JUDGED_SIGNALS, lambda _, value: value * (1 + size * draw.normal())),
    )


LEARNT = calibrate(CONTROL, [noisy("ulp"), noisy("ulp.2")])


def test_judging_returns_what_it_compared():
    test = noisy("t")
    verdict, compared = judge_pair(test, CONTROL, LEARNT, spec=spec(), control_spec=spec())
    assert verdict.name == compared.test.name == "t"
    assert set(compared.envelopes) == set(JUDGED_SIGNALS)
    loss = compared.envelopes["loss"]
    (check,) = (each for each in verdict.checks if each.name == "loss-envelope")
    assert check.measured == loss.difference[loss.worst]
    assert [each.step for each in compared.tensors] == [each.step for each in test.samples]
    assert compared.spec == spec()


def test_a_difference_has_the_sign_of_the_test_set():
    test = with_signals(run("t"), loss=lambda step, value: value * (1.1 if step > 3 else 0.9))
    found = compare_runs(test, CONTROL).curves["loss"]
    assert found.steps.tolist() == list(range(1, STEPS + 1))
    assert (np.sign(found.difference) == np.where(found.steps > 3, 1, -1)).all()
    np.testing.assert_allclose(found.ratio, np.where(found.steps > 3, 1.1, 0.9))
    alone = with_signals(test, grad_norm=None)
    assert not compare_runs(alone, CONTROL).curves["grad_norm"].steps.size


def test_limits_of_a_run_out_of_order_are_drawn_and_judge_nothing():
    order = [1, 0, *range(2, STEPS)]
    test = noisy("t")
    compared = compare_runs(replace(test, steps=test.steps[order]), CONTROL, LEARNT)
    assert not compared.envelopes
    assert set(compared.limits) == set(JUDGED_SIGNALS)
    assert all(len(each) == STEPS for each in compared.limits.values())


def test_a_tolerance_hides_no_learnt_limit():
    tolerated = compare_runs(noisy("t"), CONTROL, LEARNT, tolerances={"loss": 0.5})
    plain = compare_runs(noisy("t"), CONTROL, LEARNT)
    assert tolerated.envelopes["loss"].tolerated
    assert tolerated.limits["loss"].tolist() == [0.5] * STEPS
    assert not any(each.tolerated for each in tolerated.learnt_envelopes)
    assert tolerated.furthest_learnt == plain.furthest_learnt is not None
    assert plain.furthest_learnt.limit > plain.furthest_learnt.floor


@pytest.mark.parametrize("missing", [(), ("loss",)])
def test_shared_signals_are_those_that_both_left(missing):
    test = with_signals(run("t"), **dict.fromkeys(missing))
    compared = compare_runs(test, CONTROL)
    assert compared.shared_signals == tuple(each for each in JUDGED_SIGNALS if each not in missing)
    assert not compared.curves_alone
