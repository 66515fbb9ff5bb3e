"""A model that routes tokens to experts is given room for jumps, and no other is."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import CONTROL, broken, model_samples, turned
from judge_examples import judge, with_signals

from converge_harness.judge import calibrate
from converge_harness.judge.compare.limits import FIRST_JUMP, JUMP, jumps, routed
from converge_harness.model import Judgement, Precision


def renamed(run, old, new):
    samples = tuple(
        replace(each, names=tuple(name.replace(old, new) for name in each.names))
        for each in run.samples
    )
    return replace(run, samples=samples)


@pytest.mark.parametrize(
    "name",
    ["moe.router.gate.weight", "moe.experts.w1", "mlp.experts.3.up_proj", "moe.shared_experts.w1"],
)
def test_experts_are_recognised_by_their_names(name):
    assert routed(broken(), renamed(CONTROL, "feed_forward.w1.weight", name))


@pytest.mark.parametrize("name", ["feed_forward.w1.weight", "expertise.weight", "routers.weight"])
def test_other_models_are_not_widened(name):
    assert not routed(broken(), renamed(CONTROL, "feed_forward.w1.weight", name))
    assert not routed(replace(CONTROL, samples=()), broken())


def test_a_jump_of_a_router_is_allowed_and_a_wrong_gradient_is_not():
    def verdict(share, new):
        test = broken(gradient=turned(lambda name: "w1" in name, share))
        old = "feed_forward.w1.weight"
        return judge(renamed(test, old, new), renamed(CONTROL, old, new)).judgement

    assert verdict(1.7e-5, "feed_forward.w1.weight") is Judgement.FAIL
    assert verdict(1.7e-5, "moe.router.w1") is Judgement.PASS
    assert verdict(0.5, "moe.router.w1") is Judgement.FAIL


EXPERTS = ("feed_forward", "moe.experts")


def rounded_by(size, seed):
    """Gradients as of a repeat of the control, in which all are off by that much."""
    draw = np.random.default_rng(seed)

    def change(step, name, values):
        return values * (1 + size * draw.standard_normal(values.shape))

    repeat = with_signals(
        replace(CONTROL, name=f"ulp.{seed}", repeat="ulp"),
        loss=lambda step, loss: loss * (1 + 1e-8 * draw.standard_normal()),
    )
    return replace(repeat, samples=model_samples(gradient=change))


@pytest.mark.parametrize("size", [1e-7, 3e-4])
def test_limits_are_wider_only_where_repeats_do_not_show_how_experts_round(size):
    control = renamed(CONTROL, *EXPERTS)
    repeats = [renamed(rounded_by(size, seed), *EXPERTS) for seed in range(3)]
    learnt = calibrate(control, repeats)
    steps = np.array([1, 2, 20])
    found = jumps(steps, control, control, learnt, first=FIRST_JUMP)
    assert found.tolist() == ([FIRST_JUMP, JUMP, JUMP] if size < 1e-5 else [1, 1, 1])
    assert jumps(steps, control, control, None, first=1.0).tolist() == [1, JUMP, JUMP]
    assert jumps(steps, CONTROL, CONTROL, None, first=FIRST_JUMP).tolist() == [1, 1, 1]
    # Repeats in float32 do not show how the whole model rounds in bf16.
    low = replace(control, precision=Precision.BF16)
    for test, own in ((low, control), (low, low)):
        assert jumps(steps, test, own, learnt, first=FIRST_JUMP).tolist() == [3, 8, 8]


@pytest.mark.parametrize(("share", "judgement"), [(1e-3, Judgement.PASS), (0.04, Judgement.FAIL)])
def test_what_is_more_than_experts_round_is_wrong_at_later_steps_too(share, judgement):
    control = renamed(CONTROL, *EXPERTS)
    repeats = [renamed(rounded_by(3e-4, seed), *EXPERTS) for seed in range(3)]
    wrong = turned(lambda name: "w1" in name, share)
    late = broken(gradient=lambda step, *each: wrong(step, *each) if step == 4 else each[1])
    verdict = judge(renamed(late, *EXPERTS), control, calibrate(control, repeats))
    assert verdict.judgement is judgement, [each for each in verdict.checks if each.limit]
