"""A model that routes tokens to experts is given room for jumps, and no other is."""

from dataclasses import replace

import pytest
from cause_examples import CONTROL, broken, since, turned
from judge_examples import judge

from converge_harness.judge.compare.limits import jump, routed
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
def test_experts_are_told_by_their_names(name):
    assert routed(broken(), renamed(CONTROL, "feed_forward.w1.weight", name))


@pytest.mark.parametrize("name", ["feed_forward.w1.weight", "expertise.weight", "routers.weight"])
def test_other_models_are_not_widened(name):
    assert not routed(broken(), renamed(CONTROL, "feed_forward.w1.weight", name))
    assert not routed(replace(CONTROL, samples=()), broken())


@pytest.mark.parametrize(
    ("step", "allowed", "as_routed", "wrong"),
    # At step 1 nothing has jumped: repeats show how the experts' products are rounded.
    [(1, 5e-6, 5e-6, 1.7e-5), (4, 5e-6, 1.2e-4, 0.5)],
)
def test_a_router_may_jump_after_the_first_step_alone(step, allowed, as_routed, wrong):
    def verdict(share, new):
        moved = since(step, turned(lambda name: "w1" in name, share))
        old = "feed_forward.w1.weight"
        test, control = renamed(broken(gradient=moved), old, new), renamed(CONTROL, old, new)
        return judge(test, control).judgement

    assert verdict(allowed, "feed_forward.w1.weight") is Judgement.PASS
    assert verdict(as_routed, "moe.router.w1") is Judgement.PASS
    if as_routed > allowed:
        assert verdict(as_routed, "feed_forward.w1.weight") is Judgement.FAIL
    assert verdict(wrong, "moe.router.w1") is Judgement.FAIL


def test_below_float32_a_router_may_jump_at_the_first_step_too():
    assert jump(Precision.BF16, 1) > jump(Precision.FP32, 1) == 1
    assert jump(Precision.FP32, 2) == jump(Precision.BF16, 2) > jump(Precision.BF16, 1)
