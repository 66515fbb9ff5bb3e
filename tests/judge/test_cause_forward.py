"""A forward pass that differs by less than the loss shows, and what must not be taken for one."""

from dataclasses import replace

import pytest
from cause_examples import (
    BOTH_LOSSES,
    CONTROL,
    broken,
    changed,
    model_samples,
    other,
    scaled,
    since,
    turned,
    verdict_of,
)
from judge_examples import LOSSES, foreign, in_force, judge

from converge_harness.judge.causes.location import branch_of
from converge_harness.model import CauseClass, Parallelism, Precision

PP2 = Parallelism(dp_shard=2, pp=2)


def part(*words, layers=(0, 1, 2, 3), without=()):
    """Whether a parameter is of some layers and has one of the words in its name."""
    starts = tuple(f"layers.{layer}." for layer in layers)
    return lambda name: (
        name.startswith(starts)
        and any(word in name for word in words)
        and not any(word in name for word in without)
    )


def slightly(run, by):
    return changed(run, lambda _, x: x * (1 + by), *BOTH_LOSSES)


def both(*changes):
    """Several changes, one after the other."""

    def change(step, name, values):
        for each in changes:
            values = each(step, name, values)
        return values

    return change


LATE_ATTENTION = part("attention", layers=(2, 3))


def test_gradients_of_one_branch_with_its_last_weight_are_of_the_forward_pass():
    test = slightly(broken(PP2, gradient=turned(LATE_ATTENTION, 5e-5)), 5e-10)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "forward pass differs in the attention of layers 2-3" in verdict.cause
    assert "the last weight there is off as much as the first" in verdict.cause
    assert "the forward of the attention of layers 2-3: positions" in verdict.look_at
    assert "averaged" not in verdict.look_at


BACKWARD = {
    "the same loss to the last bit": (0.0, turned(LATE_ATTENTION, 5e-5)),
    "the last weight is right": (
        5e-10,
        turned(part("attention", layers=(2, 3), without=("wo",)), 5e-5),
    ),
    "far, as without a reduction": (5e-10, turned(LATE_ATTENTION, 0.7)),
    "everything upstream as much": (
        5e-10,
        turned(lambda name: "layers.3" not in name and name not in ("norm", "output"), 1e-2),
    ),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_other_gradients_are_of_the_backward_pass(case):
    by, gradient = BACKWARD[case]
    test = slightly(broken(PP2, gradient=gradient), by)
    assert verdict_of(test).cause_class is CauseClass.GRADIENT_DIRECTION


def test_a_branch_that_is_only_scaled_is_a_group():
    test = slightly(broken(PP2, gradient=scaled(0.98, LATE_ATTENTION), noise=1e-7), 5e-10)
    assert verdict_of(test).cause_class is CauseClass.GROUP_SCALE


def test_gradients_between_a_place_and_the_loss_are_off_by_the_forward_pass_alone():
    here = part("feed_forward.w1", "ffn_norm", layers=(2,))
    above = turned(lambda name: not here(name), 3e-5)
    verdict = verdict_of(slightly(broken(gradient=both(turned(here, 2e-2), above)), 5e-9))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    below = turned(part("", layers=(0, 1)), 3e-5)
    verdict = verdict_of(slightly(broken(gradient=both(turned(here, 2e-2), below)), 5e-9))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION


def test_in_low_precision_the_place_tells():
    low = {"precision": Precision.BF16}
    test = slightly(broken(PP2, gradient=turned(part("attention", layers=(1,)), 0.08)), 1e-6)
    verdict = verdict_of(replace(test, **low), replace(CONTROL, **low))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "the attention of layer 1" in verdict.cause


# ------------------------------------------------------------------ on later data


def parting(step, by=1e-3):
    """A loss that is another one from a step on."""
    return lambda now, x: x * (1 + by * (now >= step))


def test_weights_that_agree_and_another_loss_are_another_forward_pass():
    test = broken(gradient=since(4, turned(lambda _: True, 1e-2)))
    verdict = verdict_of(changed(test, parting(3), *BOTH_LOSSES))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "differs on the data of step 3: all weights agree after step 2" in verdict.cause
    assert "document boundaries" in verdict.look_at


def test_an_unseen_update_may_be_the_cause():
    test = broken(gradient=since(4, turned(lambda _: True, 1e-2)))
    assert verdict_of(changed(test, parting(4), *BOTH_LOSSES)).cause_class is CauseClass.LATER


def test_an_update_inside_its_wide_limit_may_be_the_cause():
    update = since(2, turned(lambda _: True, 5e-3))
    test = broken(update=update, gradient=since(4, turned(lambda _: True, 1e-2)))
    verdict = verdict_of(changed(test, parting(3), *BOTH_LOSSES))
    assert verdict.cause_class is not CauseClass.OBJECTIVE


def test_what_a_resume_changes_is_not_the_data():
    test = broken(gradient=since(4, turned(lambda _: True, 1e-2)))
    test = replace(changed(test, parting(3), *BOTH_LOSSES), replayed=(3,))
    assert verdict_of(test).cause_class is CauseClass.STATE


def test_samples_that_nobody_compared_may_be_others():
    test = broken(gradient=since(4, turned(lambda _: True, 1e-2)))
    test = replace(changed(test, parting(3), *BOTH_LOSSES), batch_digests=(), batch_agrees=())
    assert verdict_of(test).cause_class is CauseClass.LATER


def test_without_a_sample_before_it_the_place_tells():
    attention = since(4, turned(part("attention"), 2e-2))
    rest = since(4, turned(lambda name: "attention" not in name, 1e-3))
    test = changed(broken(gradient=both(attention, rest)), parting(4, 1e-5), *BOTH_LOSSES)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "at step 4 the gradients of the attention of every layer are off" in verdict.cause


# ------------------------------------------------------------------------- advice


def test_advice_on_a_recomputed_loss_is_not_about_its_average():
    test = slightly(broken(gradient=turned(part("feed_forward", "ffn_norm"), 2e-2)), 1e-4)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "the feed-forward of every layer: the norm before it (epsilon" in verdict.look_at
    assert "averaged" not in verdict.look_at


def test_advice_on_a_reported_loss_is():
    losses = tuple(1.1 * x + 0.01 * n for n, x in enumerate(LOSSES))
    curves = foreign("a", loss=losses), foreign("b", loss=LOSSES)
    verdict = judge(*(replace(curve, in_force=in_force()) for curve in curves))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "averaged over valid tokens" in verdict.look_at
    alone = judge(*curves)  # of which nobody knows that they started alike
    assert alone.cause_class is CauseClass.UNKNOWN
    assert "whether both runs had the same initial weights" in alone.look_at


BRANCHES = {
    "layers.3.attention.wq.weight": (3, "attention"),
    "layers.3.attention_norm.weight": (3, "attention"),
    "model.layers.0.input_layernorm.weight": (0, "attention"),
    "model.layers.0.post_attention_layernorm.weight": (0, "feed-forward"),
    "layers.2.ffn_norm.weight": (2, "feed-forward"),
    "layers.1.moe.experts.w1": (1, "mixture of experts"),
    "norm.weight": None,
    "layers.1.something.weight": None,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_parameter_is_in_the_branch_that_its_name_tells(name):
    assert branch_of(name) == BRANCHES[name]


# ------------------------------------------------------------ weights that stand still

NORMS = part("attention_norm", "ffn_norm")
STORED = replace(CONTROL.in_force, param_dtype="bfloat16")


def test_weights_that_stand_still_in_the_control_lost_no_state():
    """In bfloat16 an update of norms is below the spacing: a ratio to it says nothing."""
    still = since(4, scaled(0.0, NORMS))
    control = replace(
        CONTROL,
        precision=Precision.BF16,
        in_force=STORED,
        samples=model_samples(update=still),
    )
    moves = since(8, lambda step, name, x: x + NORMS(name) * 20 * other(name, step, "decay"))
    test = replace(broken(update=both(still, moves)), precision=Precision.BF16, in_force=STORED)
    verdict = verdict_of(test, control)
    assert verdict.cause_class is CauseClass.UPDATE
    assert "where the control does not move" in verdict.cause
    assert "stored in steps of 0.008" in verdict.cause
    assert "inf" not in verdict.cause
