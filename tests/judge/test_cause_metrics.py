"""In which way a number is misreported while training is right."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_NORMS,
    CONTROL,
    MODEL,
    broken,
    changed,
    scaled,
    since,
    verdict_of,
    with_tokens,
)
from judge_examples import LOSSES, NORMS, TOKENS, in_force

from converge_harness.model import CauseClass, Parallelism, Precision
from converge_harness.trainers import trainer_of_kind


def smoothed(values):
    means = [values[0]]
    for value in values[1:]:
        means.append(0.9 * means[-1] + 0.1 * value)
    return lambda step, _: means[step - 1]


def late(values):
    return lambda step, _: values[max(step - 2, 0)]


def bfloat16(value):
    fraction, power = math.frexp(value)
    return math.ldexp(round(fraction * 256), power - 8)


WAYS = {
    "degree": (("loss",), lambda _, x: x / 2, "equals 1 / the shard degree (2)"),
    "constant": (("loss",), lambda _, x: x * 1.01, "the same 1.01 times the recomputed one at"),
    "one step late": (("loss",), late(LOSSES), "one step late: each value is the recomputed one"),
    "norm late": (("grad_norm",), late(NORMS), "one step late"),
    "stale": (
        ("loss",),
        lambda step, _: LOSSES[min(step, 7) - 1],
        "the same value at every step from step 7 on",
    ),
    "smoothed": (("loss",), smoothed(LOSSES), "a running mean over steps: each takes 0.1 of"),
    "later": (
        ("grad_norm",),
        lambda step, x: x * (2 if step > 5 else 1),
        "2 times the control's at step 6 at 15 of 20 steps, which equals the shard degree (2)",
    ),
    "one step": (("loss",), lambda step, x: x * (1.3 if step == 5 else 1), "from 1.3 to 1.3"),
    "bits": (("loss",), lambda _, x: bfloat16(x), "as rounded to bfloat16"),
    "square": (("grad_norm",), lambda _, x: x * x, "the square of the recomputed one"),
    "root": (("grad_norm",), lambda _, x: math.sqrt(x), "the square root of the recomputed one"),
    "perplexity": (("loss",), lambda _, x: math.exp(x), "the exponential of the recomputed one"),
    "mean of squares": (
        ("grad_norm",),
        lambda _, x: x / math.sqrt(2),
        "equals the square root of 1 / the shard degree (2)",
    ),
    "clipped": (
        ("grad_norm",),
        lambda _, x: min(x, 0.92),
        "the recomputed one after clipping to 0.92",
    ),
    "a part": (
        ("loss",),
        lambda step, x: x * (0.5 + 0.002 * (-1) ** step),
        "about 1 / the shard degree (2), which the control has, too; the part of one rank",
    ),
    "hardly": (
        ("loss",),
        lambda step, x: x * (1 + 3e-6 * (step % 7)),
        "times the recomputed one, by no single factor",
    ),
    "no factor": (("grad_norm",), lambda step, x: x * (0.6 + step / 99), "by no single factor"),
}


@pytest.mark.parametrize("case", WAYS)
def test_the_way_of_a_wrong_metric_is_named(case):
    signals, change, words = WAYS[case]
    test = with_tokens(broken(), config={**in_force().config, "training.max_norm": 0.92})
    verdict = verdict_of(changed(test, change, *signals))
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert words in verdict.cause


def test_two_wrong_metrics_are_both_named():
    test = changed(broken(), lambda _, x: 2 * x, "loss")
    cause = verdict_of(changed(test, lambda _, x: x * x, "grad_norm")).cause
    assert "the shard degree (2), which the control has, too, while the recomputed val" in cause
    assert "the reported grad norm is wrong, too, the square of the recomputed one" in cause


def test_a_wrong_norm_above_what_clipping_allows_is_not_called_clipped():
    test = with_tokens(broken(), config={**in_force().config, "training.max_norm": 0.5})
    cause = verdict_of(changed(test, lambda _, x: min(x, 0.92), "grad_norm")).cause
    assert "clipping to" not in cause
    assert "by no single factor" in cause


def reports_norm_of(times, **degrees):
    """A run that reports the norm of its gradients with each tensor counted so many times."""
    test = broken(Parallelism(dp_shard=2, **degrees))
    norms = {each.step: each.gradients.norm for each in test.samples if each.gradients}
    weights = np.array([times(name) for name in MODEL])
    whole = {step: math.sqrt((norm**2).sum()) for step, norm in norms.items()}
    said = {step: math.sqrt(norm**2 @ weights) for step, norm in norms.items()}
    test = changed(test, whole.get, "grad_norm_recomputed")
    control = changed(CONTROL, whole.get, *BOTH_NORMS)
    test = changed(test, lambda step, x: said.get(step, x * 0.8), "grad_norm")
    return verdict_of(test, control)


def test_the_norm_of_a_part_of_the_model_is_named():
    last = ("layers.2", "layers.3", "norm", "output")
    cause = reports_norm_of(lambda name: name.startswith(last), pp=2).cause
    assert "the norm of layers 2-3, norm.weight and output.weight (as the last pip" in cause
    cause = reports_norm_of(lambda name: "wq" not in name or "2" not in name).cause
    assert "the norm without layers.2.attention.wq.weight" in cause
    cause = reports_norm_of(lambda name: "tok" in name).cause
    assert "the norm of tok_embeddings.weight alone" in cause
    twice = reports_norm_of(lambda name: 1 + ("norm" in name), tp=2)
    assert "the norm with all norms" in twice.cause
    assert "counted 2 times" in twice.cause


def test_a_norm_of_no_part_is_not_named_so():
    cause = reports_norm_of(lambda name: 0.37 + 0.1 * ("w" in name)).cause
    assert "alone" not in cause
    assert "the norm with" not in cause


# ------------------------------------------------------------------ what a factor equals


def named(factor, **ran):
    return verdict_of(with_tokens(broken(gradient=scaled(factor), noise=1e-7), **ran)).cause


def test_positions_counted_for_tokens_are_named():
    share = TOKENS[0] / 2048
    ran = {"global_batch_size": 8, "seq_len": 256}
    assert "equals the valid tokens over the token budget (0.488281)" in named(share, **ran)
    nearly = {"global_batch_size": 1, "seq_len": 1006}
    assert "the valid tokens over the token budget (0.994036)" in named(1000 / 1006, **nearly)
    assert "the valid tokens over" not in named(0.992, **nearly)
    assert "scaled by 0.9995, which equals no degree" in named(0.9995, **nearly)
    assert "scaled by 1.0001, which equals no degree" in named(1.0001, **nearly)


def test_the_batch_is_named_where_no_degree_fits():
    assert "1 / the global batch size (8):" in named(1 / 8)
    assert "the local batch size (4):" in named(4)
    tp4 = broken(Parallelism(dp_shard=2, tp=4), gradient=scaled(4), noise=1e-7)
    assert "the TP degree (4):" in verdict_of(tp4).cause


def test_stale_tokens_are_named_at_the_step_where_they_first_differ():
    stale = since(2, scaled(TOKENS[1] / TOKENS[0]))
    cause = verdict_of(broken(gradient=stale, noise=1e-7)).cause
    assert "equals the valid tokens over those of the step before (1.007)" in cause


def test_shares_of_the_tokens_are_named():
    assert "the valid tokens of a sample (125)" in named(125)
    ran = {"gradient_accumulation_steps": 5, "global_batch_size": 40}
    assert "the valid tokens of one rank's microbatch (100)" in named(100, **ran)
    assert "the sequence length (256)" in named(256)
    cp2 = broken(Parallelism(dp_shard=2, cp=2), gradient=scaled(250), noise=1e-7)
    assert "the valid tokens of a rank (250)" in verdict_of(cp2).cause


@pytest.mark.parametrize(
    ("kind", "key"), [("torchtitan", "training.max_norm"), ("megatron", "optimizer.clip_grad")]
)
def test_gradients_that_were_clipped_before_are_named(kind, key):
    config = {**in_force().config, key: 0.45}
    keys = trainer_of_kind(kind).default_spec().keys

    def ran(evidence):
        return replace(with_tokens(evidence, config=config), keys=keys)

    control = ran(CONTROL)
    cause = verdict_of(ran(broken(gradient=scaled(0.5), noise=1e-7)), control).cause
    assert "equals the share that clipping to 0.45 leaves (0.5)" in cause
    other = ran(broken(gradient=scaled(0.49), noise=1e-7))
    assert "clipping to" not in verdict_of(other, control).cause


def test_a_loss_scale_is_a_large_power_of_two():
    assert "2^16, a power of two as loss scales are" in named(2.0**16)
    assert "1 / 2^10, a power of two" in named(2.0**-10)
    assert "which equals no degree or count" in named(64.0)
    assert "which equals no degree or count" in named(65000.0)


def test_a_true_norm_that_is_off_inside_a_coarse_limit_is_no_misreport():
    test = changed(broken(noise=2e-2), lambda _, x: 1.1 * x, *BOTH_NORMS)
    sharp = {"grad_norm": 0.05, "grad_norm_recomputed": 0.5}
    verdict = verdict_of(replace(test, precision=Precision.BF16), tolerances=sharp)
    assert verdict.cause_class is not CauseClass.METRIC_ONLY
    misreported = changed(broken(noise=2e-2), lambda _, x: 1.1 * x, "grad_norm")
    verdict = verdict_of(replace(misreported, precision=Precision.BF16), tolerances=sharp)
    assert verdict.cause_class is CauseClass.METRIC_ONLY
