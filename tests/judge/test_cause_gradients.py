"""Causes from sketches of gradients: which tensors, by which factor, or from where on."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    CONTROL,
    broken,
    changed,
    other,
    scaled,
    since,
    turned,
    verdict_of,
    with_tokens,
)
from judge_examples import judge

from converge_harness.judge.causes.gradient_patterns import sort
from converge_harness.judge.compare.tensors import TensorDifferences
from converge_harness.model import CauseClass, Float8InForce, Judgement, Parallelism, Precision

PP2, TP2 = Parallelism(dp_shard=2, pp=2), Parallelism(dp_shard=2, tp=2)
FOUR_D = Parallelism(dp_shard=2, tp=2, cp=2, pp=2)


def starts(*prefixes):
    return lambda name: name.startswith(prefixes)


def has(*parts):
    return lambda name: any(part in name for part in parts)


# ------------------------------------------------------------- all by one factor

SCALES = {
    "degree": (PP2, 2, "equals the PP degree (2)"),
    "inverse": (Parallelism(dp_replicate=4), 1 / 4, "equals 1 / the replicate degree (4)"),
    "product": (replace(FOUR_D, pp=3, cp=5), 6, "equals tp x pp (6)"),
    "dp x cp": (Parallelism(dp_shard=2, cp=3, tp=5), 6, "share the loss (dp x cp) (6)"),
    "world": (Parallelism(dp_shard=2, tp=3, cp=5), 30, "equals the world size (30)"),
    "twos": (FOUR_D, 2, "equals the TP degree (2), or the CP degree (2), or the PP degree (2)"),
    "tokens": (PP2, 1000, "equals the valid tokens of the step (1000):"),
    "tokens of a rank": (PP2, 1 / 500, "1 / the valid tokens of a data-parallel rank (500)"),
    "tokens of a microbatch": (PP2, 250, "the valid tokens of a pipeline microbatch (250)"),
    "twice": (Parallelism(dp_replicate=3), 1 / 9, "1 / the replicate degree squared (9)"),
    "none": (TP2, 1.37, "which equals no degree or count of this run"),
    "sign": (TP2, -1, "they have the opposite sign"),
    "the control's too": (
        Parallelism(dp_shard=2),
        2,
        "the shard degree (2), which the control has, too",
    ),
}


@pytest.mark.parametrize("case", SCALES)
def test_one_factor_of_all_gradients_is_named(case):
    parallelism, factor, words = SCALES[case]
    verdict = verdict_of(broken(parallelism, gradient=scaled(factor), noise=1e-7))
    assert verdict.cause_class is CauseClass.GRADIENT_SCALE
    assert f"gradients are scaled by {factor:.4g}" in verdict.cause
    assert words in verdict.cause
    assert "all 35 parameters alike at step 1" in verdict.cause
    assert verdict.cause.endswith("rounding), while the loss is the same")
    assert "where gradients are divided: loss scaling by valid tokens" in verdict.look_at


def test_a_factor_that_only_some_limits_notice_is_still_one_of_all():
    control = np.eye(3, 64)
    limits = np.array([1e-6, 1e-6, 1e-4])
    found = TensorDifferences(np.full(3, 1e-5), limits, np.zeros(3, np.bool_), "floor")
    assert sort((1 + 1e-5) * control, control, found).factor_of_all.members == (0, 1, 2)
    two = control * np.array([[1 + 1e-5], [1 + 1e-5], [1]])
    found = TensorDifferences(np.array([1e-5, 1e-5, 0]), limits, np.zeros(3, np.bool_), "floor")
    assert sort(two, control, found).factor_of_all is None


def test_a_factor_that_only_the_norm_notices_is_one_of_all():
    test = broken(gradient=scaled(1 + 1e-6))
    verdict = verdict_of(changed(test, lambda _, x: x * (1 + 1e-3), *BOTH_NORMS))
    assert verdict.cause_class is CauseClass.GRADIENT_SCALE
    test = broken(gradient=turned(has("wq"), 1e-6))
    verdict = verdict_of(changed(test, lambda _, x: x * (1 + 1e-3), *BOTH_NORMS))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION


def test_counts_of_microbatches_are_named():
    test = broken(gradient=scaled(1 / 8))
    assert "1 / gradient accumulation steps (8)" in (
        verdict_of(with_tokens(test, gradient_accumulation_steps=8)).cause
    )
    test = broken(PP2, gradient=scaled(12))
    assert "accumulation steps x microbatches (12)" in (
        verdict_of(with_tokens(test, gradient_accumulation_steps=3)).cause
    )


def test_a_factor_near_a_degree_is_not_the_degree():
    verdict = verdict_of(broken(TP2, gradient=scaled(2.01)))
    assert "which equals no degree or count of this run" in verdict.cause


def test_in_a_coarse_precision_a_factor_may_leave_more():
    test = broken(TP2, gradient=scaled(2), noise=2e-2, precision=Precision.BF16)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.GRADIENT_SCALE
    assert "scaled by 2" in verdict.cause
    assert ", rounding)" in verdict.cause


def test_what_rounding_does_not_explain_beside_a_factor_is_said():
    verdict = verdict_of(broken(TP2, gradient=scaled(2), noise=1e-3))
    assert verdict.cause_class is CauseClass.GRADIENT_SCALE
    assert "more than rounding, so something else is wrong as well" in verdict.cause


def test_half_of_the_batch_is_a_direction_and_no_factor():
    def half(step, name, values):
        return values / 2 + other(name, step, "microbatch") / 2

    verdict = verdict_of(broken(Parallelism(dp_shard=4), gradient=half))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    assert "35 of 35 gradients are wrong in direction" in verdict.cause
    assert "where gradients are summed" in verdict.cause
    assert "data-parallel reduction, no_sync, accumulation" in verdict.look_at


# ----------------------------------------------------------------- a group by one

GROUPS = {
    "last stage": (
        starts("layers.2.", "layers.3.", "norm", "output"),
        "layers 2-3, norm.weight and output.weight (as the last pipeline stage may hold) by 2",
        "the pipeline schedule",
    ),
    "first stage": (
        starts("layers.0.", "layers.1.", "tok"),
        "layers 0-1 and tok_embeddings.weight (as the first pipeline stage may hold) by 2",
        "the backward between layers 1 and 2",
    ),
    "one layer": (
        starts("layers.1."),
        "layer 1 (as a middle pipeline stage may hold) by 2",
        "the pipeline schedule",
    ),
    "one kind": (has("wq"), "layers.*.attention.wq.weight by 2", "head splitting"),
    "one tensor": (has("1.attention.wq"), "layers.1.attention.wq.weight by 2", "head splitting"),
    "norms": (
        has("norm"),
        "all norms (layers.*.attention_norm.weight, layers.*.ffn_norm.weight and norm.weight) by 2",
        "norm gradients",
    ),
    "embedding": (has("tok"), "tok_embeddings.weight by 2", "tied weights"),
    "output": (has("output"), "output.weight by 2", "loss parallel"),
}


def test_queries_and_keys_by_a_factor_of_no_degree_are_attention_scores():
    queries_and_keys = has("wq", "wk")
    verdict = verdict_of(broken(TP2, gradient=scaled(1.0003, queries_and_keys)))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "gradients of queries and keys alone are scaled by 1.0003 at step 1" in verdict.cause
    for which, factor in ((queries_and_keys, 2), (has("wq"), 1.0003), (has("wv", "wk"), 1.0003)):
        verdict = verdict_of(broken(TP2, gradient=scaled(factor, which)))
        assert verdict.cause_class is CauseClass.GROUP_SCALE


@pytest.mark.parametrize("case", GROUPS)
def test_a_group_by_one_factor_is_named(case):
    where, words, look_at = GROUPS[case]
    verdict = verdict_of(broken(PP2, gradient=scaled(2, where), noise=1e-7))
    assert verdict.cause_class is CauseClass.GROUP_SCALE
    assert words in verdict.cause
    assert "equals the PP degree (2)" in verdict.cause
    assert "are right" in verdict.cause
    assert look_at in verdict.look_at


def test_two_groups_by_two_factors_are_named():
    def two(step, name, values):
        return values * (2 if "norm" in name else 3 if "wo" in name else 1)

    cause = verdict_of(broken(Parallelism(tp=2, cp=3), gradient=two)).cause
    assert "norm.weight) by 2, which equals the TP degree (2)" in cause
    assert "layers.*.attention.wo.weight by 3, which equals the CP degree (3)" in cause


def test_many_factors_are_not_listed():
    verdict = verdict_of(broken(gradient=lambda step, name, values: values * len(name)))
    assert verdict.cause_class is CauseClass.GROUP_SCALE
    assert "all 35 parameters, each by another factor from 11 to 31" in verdict.cause


def test_a_group_of_which_some_are_turned_is_no_scale():
    def mixed(step, name, values):
        wrong = 2 * values if "wq" in name else values
        return wrong + other(name, step, "wrong") if "1.attention.wq" in name else wrong

    verdict = verdict_of(broken(gradient=mixed))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    assert "1 of 35 gradients are wrong in direction" in verdict.cause
    assert "3 more only in scale" in verdict.cause


# ------------------------------------------------------------------------ direction


def test_norms_under_tp_are_sequence_parallel():
    verdict = verdict_of(broken(TP2, gradient=turned(has("norm"))))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    assert "9 of 35 gradients are wrong in direction at step 1, while the loss is" in verdict.cause
    assert "only norms are off, which TP replicates" in verdict.cause
    assert "SequenceParallel" in verdict.look_at
    without_tp = verdict_of(broken(gradient=turned(has("norm"))))
    assert "SequenceParallel" not in without_tp.look_at


def test_the_worst_come_first_with_what_the_best_factor_leaves():
    def worse(step, name, values):
        share = {"layers.1.attention.wq.weight": 1.0, "layers.2.attention.wq.weight": 0.1}
        return values + share.get(name, 0.0) * other(name, step, "wrong")

    cause = verdict_of(broken(gradient=worse)).cause
    assert "worst layers.1.attention.wq.weight by " in cause
    assert cause.index("layers.1.attention.wq.weight by") < cause.index(
        "layers.2.attention.wq.weight by"
    )
    assert "with a residual of" in cause


RING = starts("layers.0.", "layers.1.", "layers.2.", "tok")
CORE = has("3.attention.wq", "3.attention.wk", "3.attention.wv", "3.attention_norm")


def test_an_attention_that_breaks_in_the_backward_spoils_all_upstream():
    ring = turned(lambda name: RING(name) or CORE(name))
    verdict = verdict_of(broken(Parallelism(dp_shard=2, cp=2), gradient=ring))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    assert "in layer 3, where the backward pass first goes wrong, attention.wk, " in verdict.cause
    assert "and attention.wo, feed_forward.w1, feed_forward.w2 and ffn_norm are right" in (
        verdict.cause
    )
    assert "the ring of context parallel" in verdict.look_at


def test_attention_projections_alone_are_not_the_ring():
    verdict = verdict_of(broken(TP2, gradient=turned(has("wq", "wk", "wv"))))
    assert "only attention weights are off" in verdict.cause
    assert "first goes wrong" not in verdict.cause
    assert "ring" not in verdict.look_at


def test_a_feed_forward_that_breaks_in_the_backward_is_not_the_attention():
    core = has("2.feed_forward.w1", "2.attention", "2.ffn_norm")
    wrong = turned(lambda name: starts("layers.0.", "layers.1.", "tok")(name) or core(name))
    verdict = verdict_of(broken(TP2, gradient=wrong))
    assert "in layer 2, where the backward pass first goes wrong" in verdict.cause
    assert "feed_forward.w2 is right" in verdict.cause
    assert verdict.look_at.startswith("the backward of layer 2 in its feed-forward: the activation")


def below(*layers):
    return starts("tok", *(f"layers.{layer}." for layer in layers))


@pytest.mark.parametrize(
    ("in_layer_2", "look_at"),
    [
        (("2.attention",), "between its feed-forward and its attention: the norm's own backward"),
        (
            ("2.attention", "2.ffn_norm"),
            "between its feed-forward and its attention: what the projections hand back",
        ),
        (("2.attention_norm",), "layer 2: what the projections hand back to the norm before them"),
        (("2.attention_norm", "2.feed_forward.w1", "2.attention.wq"), "the attention itself"),
    ],
)
def test_what_is_right_in_the_first_wrong_layer_says_where_in_it(in_layer_2, look_at):
    wrong = turned(lambda name: below(0, 1)(name) or has(*in_layer_2)(name))
    assert look_at in verdict_of(broken(TP2, gradient=wrong)).look_at


def test_a_right_output_projection_above_wrong_hidden_states():
    wrong = verdict_of(broken(TP2, gradient=turned(lambda name: not name.startswith("output"))))
    assert "the output projection is right and everything below it is off" in wrong.cause
    assert "the chunks of a chunked loss" in wrong.look_at
    but_one = turned(lambda name: not name.startswith(("output", "tok")))
    assert "the output projection is right" not in verdict_of(broken(gradient=but_one)).cause


def test_gradients_in_wrong_places_keep_their_norms():
    layer = starts("layers.1.")
    backwards = broken(gradient=lambda _, name, values: values[::-1] if layer(name) else values)
    cause = verdict_of(backwards).cause
    assert "every one has the norm of the control's: the same numbers in other places" in cause
    lost = broken(gradient=turned(layer))
    assert "the same numbers" not in verdict_of(lost).cause


def test_gradients_of_two_parameters_exchanged_have_each_others_norms():
    pair = {"layers.1.feed_forward.w1.weight": "layers.1.feed_forward.w2.weight"}
    pair |= {there: here for here, there in pair.items()}

    def exchanged(step, name, values):
        return other(pair[name], step, "gradient") if name in pair else values

    cause = verdict_of(broken(gradient=exchanged)).cause
    assert "gradients are exchanged" in cause
    assert "layers.1.feed_forward.w1.weight that of layers.1.feed_forward.w2.weight" in cause
    wrong = verdict_of(broken(gradient=turned(lambda name: name in pair)))
    assert "exchanged" not in wrong.cause


def test_whole_layers_that_are_off_alone_are_no_matter_of_the_backward_pass():
    verdict = verdict_of(broken(gradient=turned(starts("layers.1.", "layers.2."))))
    assert "only layers 1-2 are off, in every parameter" in verdict.cause
    assert verdict.look_at.startswith("how these layers' gradients are reduced and laid out")
    part = turned(lambda name: starts("layers.2.")(name) and "wo" not in name)
    verdict = verdict_of(broken(gradient=part))
    assert "in every parameter" not in verdict.cause
    assert "in layer 2, and the placements and reductions" in verdict.look_at


def test_embeddings_and_output_together_are_the_vocabulary():
    verdict = verdict_of(broken(TP2, gradient=turned(has("tok", "output"))))
    assert "tied weights" in verdict.look_at
    with_norm = verdict_of(broken(TP2, gradient=turned(has("tok", "output", "3.ffn_norm"))))
    assert "tied weights" not in with_norm.look_at


def test_what_the_test_set_adds_comes_first():
    test = with_tokens(
        broken(TP2, gradient=turned(has(""), 0.1)),
        float8=Float8InForce(modules=4),
        gradient_accumulation_steps=2,
    )
    adds = "first what tp 2, float8 and gradient accumulation add to the control"
    assert adds in verdict_of(test).look_at


def test_stages_of_an_interleaved_schedule_are_recognised():
    both = scaled(2, starts("layers.0.", "layers.2."))
    cause = verdict_of(broken(PP2, gradient=both)).cause
    assert "layers 0, 2 (as the stages of one pipeline rank may hold, if its" in cause


def test_a_pipeline_boundary_spoils_all_upstream():
    verdict = verdict_of(broken(PP2, gradient=turned(starts("layers.0.", "layers.1.", "tok"))))
    assert "everything from layer 1 down to the embeddings is off" in verdict.cause
    assert "what a pipeline stage hands back" in verdict.look_at


def test_a_shard_without_gradient_is_seen_by_its_zeros():
    def holed(step, name, values):
        holes = values.copy()
        holes[: values.size // 2] = 0
        return holes if "wo" in name else values

    cause = verdict_of(broken(TP2, gradient=holed)).cause
    assert "50% of layers." in cause
    assert "get no gradient at all" in cause


def test_a_cast_to_bfloat16_is_recognised_by_its_size():
    cast = turned(has("attention.wo", "w2"), 3e-3)
    assert "as by rounding to bfloat16" in verdict_of(broken(TP2, gradient=cast)).cause
    worse = turned(has("attention.wo", "w2"), 3e-1)
    assert "bfloat16" not in verdict_of(broken(TP2, gradient=worse)).cause


def test_a_gradient_of_zeros_is_no_gradient():
    verdict = verdict_of(broken(gradient=scaled(0, has("tok"))))
    assert verdict.cause_class is CauseClass.NO_GRADIENT
    assert "the gradient of tok_embeddings.weight is all zeros at step 1" in verdict.cause
    small = verdict_of(broken(gradient=scaled(1e-6, has("tok"))))
    assert small.cause_class is CauseClass.GROUP_SCALE


# ------------------------------------------------------------- with the loss, later


def test_gradients_that_follow_a_wrong_loss_are_the_objective():
    test = changed(broken(gradient=turned(has(""), 0.1)), lambda _, x: 1.01 * x, *BOTH_LOSSES)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "35 of 35 gradients are off, worst" in verdict.cause
    twice = changed(broken(TP2, gradient=scaled(2)), lambda _, x: 2 * x, *BOTH_LOSSES, *BOTH_NORMS)
    cause = verdict_of(twice).cause
    assert "which equals the TP degree (2)" in cause
    assert "all gradients are 2 times the control's, too" in cause


def test_a_loss_whose_gradients_agree_is_only_a_number():
    verdict = verdict_of(changed(broken(), lambda _, x: 1.01 * x, *BOTH_LOSSES))
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert "the gradients of all 35 parameters agree" in verdict.cause


def test_gradients_inside_a_coarse_limit_prove_no_metric():
    test = broken(gradient=turned(has(""), 3e-2), precision=Precision.BF16)
    verdict = verdict_of(changed(test, lambda _, x: 1.01 * x, *BOTH_LOSSES))
    assert verdict.cause_class is CauseClass.OBJECTIVE
    assert "every gradient is inside its limit" in verdict.cause


def test_gradients_that_are_not_set_to_zero():
    def kept(step, name, values):
        return values + other(name, 1, "gradient") if step == 2 else values

    verdict = verdict_of(broken(gradient=kept))
    assert verdict.cause_class is CauseClass.STATE
    assert "are the sum of both steps'" in verdict.cause
    assert verdict.look_at == "where gradients are set to zero: zero_grad"
    doubled = verdict_of(broken(gradient=since(2, scaled(2))))
    assert doubled.cause_class is CauseClass.GRADIENT_SCALE
    assert "at step 2" in doubled.cause


def test_gradients_that_are_not_set_to_zero_after_clipping():
    def kept(step, name, values):
        return values + 0.3 * other(name, 1, "gradient") if step == 2 else values

    verdict = verdict_of(broken(gradient=kept, noise=1e-7))
    assert verdict.cause_class is CauseClass.STATE
    assert "(0.3 of them: as clipping left them)" in verdict.cause
    taken = broken(gradient=lambda step, name, x: x - other(name, 1, "gradient") * (step == 2))
    assert verdict_of(taken).cause_class is CauseClass.GRADIENT_DIRECTION


def test_a_gradient_that_has_nearly_nothing_of_the_controls_is_turned_and_not_scaled():
    control = np.eye(3, 64)
    test = 0.01 * control + np.eye(3, 64, 3)
    found = TensorDifferences(np.full(3, 1e2), np.full(3, 1e-5), np.zeros(3, np.bool_), "floor")
    assert sort(test, control, found).turned == (0, 1, 2)
    assert sort(0.01 * control, control, found).factor_of_all.factor == pytest.approx(0.01)


def test_a_scale_that_begins_later_is_a_scale_from_then_on():
    test = broken(PP2, gradient=since(8, scaled(2)))
    test = changed(test, lambda step, x: 2 * x if step >= 7 else x, *BOTH_NORMS)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.GRADIENT_SCALE
    assert verdict.cause.startswith("from step 7 on gradients are scaled by 2, which equals the PP")
    assert "at step 8 all gradients are 2 times the control's" in verdict.cause


def test_a_group_that_is_scaled_later_is_seen_by_the_sketches_alone():
    verdict = verdict_of(broken(TP2, gradient=since(8, scaled(2, has("wq")))))
    assert verdict.cause_class is CauseClass.GROUP_SCALE
    assert "parameters at step 8: layers.*.attention.wq.weight by 2" in verdict.cause
    assert verdict.cause.endswith("the samples before agree")


def test_a_later_sample_that_is_off_by_little_is_no_scale():
    test = broken(gradient=since(8, turned(has(""), 1e-4)))
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.LATER
    assert "the curves agree throughout, and tensors do not" in verdict.cause


def test_right_gradients_have_no_cause():
    verdict = judge(broken(FOUR_D, noise=1e-7), CONTROL)
    assert verdict.judgement is Judgement.PASS
    assert (verdict.cause, verdict.cause_class, verdict.look_at) == ("", None, "")


@pytest.mark.parametrize(
    ("beside", "expected"),
    [(1e-3, CauseClass.GROUP_SCALE), (0.5, CauseClass.GRADIENT_DIRECTION)],
)
def test_tensors_just_outside_their_limits_do_not_displace_a_scale(beside, expected):
    def change(step, name, values):
        if "wq" in name:
            return 2 * values
        return values + beside * ("w2" in name) * other(name, step, "wrong")

    verdict = verdict_of(broken(TP2, gradient=change))
    assert verdict.cause_class is expected
    if expected is CauseClass.GROUP_SCALE:
        assert "gradients are scaled in 4 of 35 parameters" in verdict.cause
        assert "; 4 more are slightly off: layers." in verdict.cause
