"""A model that routes tokens to experts is given room for jumps, and no other is."""

from dataclasses import replace

import pytest
from cause_examples import CONTROL, broken, turned
from judge_examples import judge

from converge_harness.judge.compare.limits import routed
from converge_harness.model import Judgement


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


def test_a_jump_of_a_router_is_allowed_and_a_wrong_gradient_is_not():
    def verdict(share, new):
        test = broken(gradient=turned(lambda name: "w1" in name, share))
        old = "feed_forward.w1.weight"
        return judge(renamed(test, old, new), renamed(CONTROL, old, new)).judgement

    assert verdict(1.7e-5, "feed_forward.w1.weight") is Judgement.FAIL
    assert verdict(1.7e-5, "moe.router.w1") is Judgement.PASS
    assert verdict(0.5, "moe.router.w1") is Judgement.FAIL
