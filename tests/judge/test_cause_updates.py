"""Causes from sketches of weights: other ones to begin with, and right gradients that move them
otherwise or not at all."""

from dataclasses import replace

import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    MODEL,
    broken,
    changed,
    initial_weights,
    other,
    scaled,
    since,
    turned,
    verdict_of,
)

from converge_harness.model import CauseClass, Parallelism


def has(*parts):
    return lambda name: any(part in name for part in parts)


# --------------------------------------------------------------- initial weights


def test_swapped_layers_are_recognised_by_their_norms():
    swap = {"layers.1.": "layers.2.", "layers.2.": "layers.1."}
    weights = initial_weights()
    swapped = {name: weights[swap.get(name[:9], name[:9]) + name[9:]] for name in MODEL}
    verdict = verdict_of(broken(weights=swapped))
    assert verdict.cause_class is CauseClass.STATE
    assert "layers 1-2 differ before the first step" in verdict.cause
    assert "layer 1 looks like the control's layer 2 and layer 2 looks like" in verdict.cause
    assert "which layers each pipeline stage loads" in verdict.look_at


def test_other_weights_look_like_no_swap():
    fresh = {name: other(name, 0, "another seed") for name in MODEL}
    verdict = verdict_of(broken(weights=fresh))
    assert verdict.cause_class is CauseClass.STATE
    assert "all 35 parameters differ before the first step" in verdict.cause
    assert "no checkpoint was loaded, or another one" in verdict.cause
    assert "looks like" not in verdict.cause


def test_weights_that_are_scaled_at_first():
    weights = initial_weights()
    weights["norm.weight"] *= 0.5
    verdict = verdict_of(broken(weights=weights))
    assert "norm.weight differs before the first step" in verdict.cause
    assert verdict.cause.endswith("; scaled by 0.5")


def test_other_weights_explain_all_that_follows():
    weights = initial_weights()
    weights["norm.weight"] *= 0.5
    test = broken(weights=weights, gradient=turned(has("")), update=turned(has("")))
    test = changed(test, lambda _, x: 1.1 * x, *BOTH_LOSSES, *BOTH_NORMS)
    assert verdict_of(test).cause_class is CauseClass.STATE


# ----------------------------------------------------------------------- frozen

FROZEN = {
    "a kind": (has("norm"), "all norms (", "the optimizer's parameter list"),
    "one": (has("1.attention.wq"), "layers.1.attention.wq.weight stays as it was", "list"),
    "all": (has(""), "all 35 parameters stay as they were", "whether the optimizer steps at all"),
}


@pytest.mark.parametrize("case", FROZEN)
def test_parameters_that_do_not_move_are_named(case):
    where, words, look_at = FROZEN[case]
    verdict = verdict_of(broken(update=scaled(0, where)))
    assert verdict.cause_class is CauseClass.FROZEN
    assert words in verdict.cause
    assert "from step 0 to step 1, despite getting gradients" in verdict.cause
    assert look_at in verdict.look_at


def test_parameters_that_hardly_move_are_not_frozen():
    verdict = verdict_of(broken(update=scaled(1e-3, has("norm"))))
    assert verdict.cause_class is CauseClass.UPDATE


@pytest.mark.parametrize("stuck_from", [1, 4])
def test_wrong_updates_of_which_some_are_nothing_are_not_called_frozen(stuck_from):
    stuck, moved = since(stuck_from, scaled(0, has("norm."))), scaled(0.9, has("feed_forward"))
    test = broken(update=lambda step, name, x: stuck(step, name, moved(step, name, x)))
    assert verdict_of(test).cause_class is CauseClass.UPDATE


def test_parameters_without_gradient_are_not_called_frozen():
    still = scaled(0, has("tok"))
    verdict = verdict_of(broken(update=still, gradient=still))
    assert verdict.cause_class is CauseClass.NO_GRADIENT


def test_parameters_that_stop_later_are_frozen_from_then_on():
    test = broken(update=since(8, scaled(0, has("wq"))), gradient=since(16, turned(has(""), 0.1)))
    test = changed(test, lambda step, x: x * (1.001 if step > 5 else 1), *BOTH_LOSSES)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.FROZEN
    assert "layers.*.attention.wq.weight stay as they were from step 4 to step 8" in verdict.cause


# ---------------------------------------------------------------------- updates


def test_another_weight_decay_is_measured():
    weights = initial_weights()
    verdict = verdict_of(broken(update=lambda step, name, x: x - 0.1 * weights[name]))
    assert verdict.cause_class is CauseClass.UPDATE
    assert "gradients agree and the update differs at step 1" in verdict.cause
    assert "so weight decay differs by 0.1" in verdict.cause
    assert "weight decay" in verdict.look_at


def test_a_difference_that_is_no_multiple_of_the_weights_is_no_decay():
    verdict = verdict_of(broken(update=turned(has(""), 0.1)))
    assert verdict.cause_class is CauseClass.UPDATE
    assert "weight decay differs" not in verdict.cause
    assert "clipping (max_norm" in verdict.look_at


def test_a_group_with_another_learning_rate_is_named():
    verdict = verdict_of(broken(update=scaled(0.1, has("norm"))))
    assert verdict.cause_class is CauseClass.UPDATE
    assert "norm.weight) move 0.1 times as far; the other 26 are right" in verdict.cause
    assert verdict.look_at.startswith("the learning rate that the optimizer really uses")


def test_all_updates_by_one_factor():
    verdict = verdict_of(broken(update=scaled(2)))
    assert "all 35 parameters move 2 times as far" in verdict.cause


def test_an_update_that_differs_from_the_second_step_on_is_state_of_the_optimizer():
    verdict = verdict_of(broken(update=since(2, turned(has(""), 0.5))))
    assert verdict.cause_class is CauseClass.UPDATE
    assert "the update differs at step 2" in verdict.cause


def test_an_update_that_differs_later_says_since_when():
    verdict = verdict_of(broken(update=since(8, turned(has(""), 0.5))))
    assert verdict.cause_class is CauseClass.UPDATE
    assert "differs at step 8 since step 4" in verdict.cause
    assert verdict.look_at.startswith("what changes after step 4")


def test_a_first_update_within_its_wide_limit_is_known_by_what_follows():
    test = broken(
        Parallelism(dp_shard=2, tp=2),
        update=turned(has(""), 5e-3),
        gradient=since(2, turned(has(""), 1e-2)),
    )
    test = changed(test, lambda step, x: x * (1 + 1e-4 * (step > 1)), *BOTH_LOSSES)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.UPDATE
    assert "the first update differs: the gradients of step 1 agree" in verdict.cause
    same_loss = replace(test, signals=broken().signals)
    assert verdict_of(same_loss).cause_class is CauseClass.GRADIENT_DIRECTION


def test_a_gradient_off_by_no_more_than_the_update_before_it_is_its_consequence():
    test = broken(update=turned(has(""), 5e-3), gradient=since(2, turned(has(""), 1e-3)))
    assert verdict_of(test).cause_class is CauseClass.UPDATE
