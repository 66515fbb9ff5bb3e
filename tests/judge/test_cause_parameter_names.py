"""What any cause must hold to, and how tensors and factors are put into words."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    CONTROL,
    MODEL,
    broken,
    changed,
    scaled,
    turned,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_examples import judge, run, with_signals

from converge_harness.judge.causes.parameter_names import ParameterRole, describe, role_of, spans
from converge_harness.model import (
    CauseClass,
    Disagreement,
    InForce,
    Judgement,
    Parallelism,
    ReplicaSample,
)

UNHURRIED = settings(max_examples=25)
NAMES = list(MODEL)

# ------------------------------------------------------------------ any cause at all


def where(chosen):
    return lambda name: name in chosen


CHANGES = {
    "scale": lambda chosen: {"gradient": scaled(3.7, where(chosen))},
    "direction": lambda chosen: {"gradient": turned(where(chosen))},
    "no gradient": lambda chosen: {"gradient": scaled(0, where(chosen))},
    "frozen": lambda chosen: {"update": scaled(0, where(chosen))},
    "update": lambda chosen: {"update": turned(where(chosen))},
    "not finite": lambda chosen: {"gradient": scaled(float("nan"), where(chosen))},
}
WITHOUT = {
    "everything": lambda test: test,
    "tensors": lambda test: replace(test, samples=()),
    "gradients": lambda test: replace(
        test, samples=tuple(replace(sample, gradients=None) for sample in test.samples)
    ),
    "first samples": lambda test: replace(test, samples=test.samples[3:]),
    "a record of what ran": lambda test: replace(test, in_force=None),
    "an empty record": lambda test: replace(test, in_force=InForce()),
    "digests": lambda test: replace(test, batch_digests=(), batch_agrees=()),
    "norms": lambda test: with_signals(test, **dict.fromkeys(BOTH_NORMS)),
    "losses": lambda test: with_signals(test, **dict.fromkeys(BOTH_LOSSES)),
    "a probe": lambda test: with_signals(test, loss_recomputed=None, grad_norm_recomputed=None),
    "tokens and lr": lambda test: with_signals(test, tokens=None, lr=None),
}


@UNHURRIED
@given(
    st.sampled_from(list(CHANGES)),
    st.sets(st.sampled_from(NAMES), min_size=1),
    st.sampled_from(list(WITHOUT)),
    st.booleans(),
    st.sampled_from([(), *([signal] for signal in (*BOTH_LOSSES, *BOTH_NORMS))]),
)
def test_a_fail_has_a_cause_with_a_class_and_nothing_else_has_one(
    change, chosen, without, of_both, off
):
    test = broken(Parallelism(dp_shard=2, tp=2, pp=2), **CHANGES[change](chosen))
    test = WITHOUT[without](changed(test, lambda step, x: x * (1.5 if step > 3 else 1), *off))
    control = WITHOUT[without](CONTROL) if of_both else CONTROL
    for pair in ((test, control), (control, test)):
        verdict = judge(*pair)
        failed = verdict.judgement is Judgement.FAIL
        assert bool(verdict.cause_class) == failed
        assert bool(verdict.cause) == (verdict.judgement is not Judgement.PASS)
        known = failed and verdict.cause_class is not CauseClass.UNKNOWN
        assert bool(verdict.look_at) == known
        assert "nan" not in verdict.cause.lower() or change == "not finite"


@UNHURRIED
@given(
    st.lists(
        st.builds(
            Disagreement,
            st.sampled_from(["parameter", "gradient", "optimizer state", "buffer"]),
            st.sampled_from(NAMES),
            st.sampled_from([(), ("tp",), ("dp_replicate", "tp")]),
            st.sampled_from([(), ((0, 1), (2,))]),
        ),
        max_size=4,
    ),
    st.integers(0, 8),
    st.integers(0, 8),
)
def test_any_disagreement_of_replicas_is_put_into_words(disagreements, more, step):
    sample = ReplicaSample(step, {}, tuple(disagreements), len(disagreements) + more + 1)
    verdict = judge(replace(broken(), replicas=(sample,)), CONTROL)
    assert verdict.cause_class is CauseClass.REPLICAS
    assert verdict.look_at


CLASSES = {
    "scale of all": ({"gradient": scaled(2)}, CauseClass.GRADIENT_SCALE),
    "scale of some": ({"gradient": scaled(2, where(NAMES[:9]))}, CauseClass.GROUP_SCALE),
    "direction": ({"gradient": turned(where(NAMES[:9]))}, CauseClass.GRADIENT_DIRECTION),
}


@pytest.mark.parametrize("case", CLASSES)
@pytest.mark.parametrize("noise", [0.0, 1e-8, 1e-7, 1e-6])
def test_rounding_changes_no_class(case, noise):
    change, expected = CLASSES[case]
    assert judge(broken(noise=noise, **change), CONTROL).cause_class is expected


def test_the_order_of_the_names_changes_nothing():
    def reordered(sample, order):
        def rows(old):
            fields = ("sketch", "norm", "zeros", "not_finite")
            return old and replace(old, **{field: getattr(old, field)[order] for field in fields})

        return replace(
            sample,
            names=tuple(sample.names[index] for index in order),
            sizes=sample.sizes[order],
            parameters=rows(sample.parameters),
            gradients=rows(sample.gradients),
        )

    test = broken(Parallelism(dp_shard=2, tp=2), gradient=scaled(2, where(NAMES[3:7])))
    order = np.random.default_rng(1).permutation(len(NAMES))
    shuffled = tuple(reordered(sample, order) for sample in test.samples)
    assert judge(replace(test, samples=shuffled), CONTROL).cause == judge(test, CONTROL).cause


def test_what_no_signature_recognises_is_unknown_and_shows_what_failed():
    test = changed(broken(), lambda _, x: 1.01 * x, *BOTH_LOSSES)
    test = replace(test, samples=())
    verdict = judge(test, CONTROL, tolerances={"loss": 0.1}, margin=1e-3)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is CauseClass.UNKNOWN
    assert verdict.cause.startswith("unknown: loss-equivalent failed (")
    assert verdict.look_at == ""


def test_a_right_run_has_neither_cause_nor_class():
    verdict = judge(run(), run())
    assert (verdict.cause, verdict.cause_class, verdict.look_at) == ("", None, "")


# --------------------------------------------------------------------------- words

ROLES = {
    "tok_embeddings.weight": ParameterRole.EMBEDDING,
    "model.embed_tokens.weight": ParameterRole.EMBEDDING,
    "output.weight": ParameterRole.OUTPUT,
    "lm_head.weight": ParameterRole.OUTPUT,
    "layers.3.attention.wq.weight": ParameterRole.ATTENTION,
    "layers.3.attention.qkv_linear.wqkv.weight": ParameterRole.ATTENTION,
    "model.layers.3.self_attn.o_proj.weight": ParameterRole.ATTENTION,
    "layers.3.attention.q_norm.weight": ParameterRole.NORM,
    "decoder.layers.3.input_layernorm.weight": ParameterRole.NORM,
    "layers.3.ffn_norm.weight": ParameterRole.NORM,
    "norm.weight": ParameterRole.NORM,
    "layers.3.moe.router.gate.weight": ParameterRole.ROUTER,
    "layers.3.moe.experts.w1": ParameterRole.EXPERTS,
    "layers.3.moe.experts.7.w1.weight": ParameterRole.EXPERTS,
    "layers.3.attention.wq.bias": ParameterRole.BIAS,
    "layers.3.feed_forward.w2.weight": ParameterRole.FEED_FORWARD,
    "model.layers.3.mlp.gate_proj.weight": ParameterRole.FEED_FORWARD,
    "layers.3.something.weight": ParameterRole.OTHER,
}


@pytest.mark.parametrize("name", ROLES)
def test_a_parameter_has_the_role_that_its_name_tells(name):
    assert role_of(name) is ROLES[name]


DESCRIBED = {
    "layers.*.attention.wq.weight": [f"layers.{layer}.attention.wq.weight" for layer in range(4)],
    "layers.0, 2-3.attention.wq.weight": [
        f"layers.{layer}.attention.wq.weight" for layer in (0, 2, 3)
    ],
    "layer 2": [name for name in NAMES if name.startswith("layers.2.")],
    "all 35 parameters": NAMES,
    "norm.weight": ["norm.weight"],
    "norm.weight and output.weight": ["norm.weight", "output.weight"],
}


@pytest.mark.parametrize("words", DESCRIBED)
def test_a_group_is_described_in_few_words(words):
    assert describe(DESCRIBED[words], NAMES) == words


def test_names_without_layers_and_with_two_stacks():
    assert describe(["w"], ["w", "b"]) == "w"
    two = [f"{stack}.{layer}.w" for stack in ("encoder", "decoder") for layer in range(3)]
    assert describe(two[:3], two) == "encoder.*.w"
    experts = [f"layers.0.experts.{expert}.w" for expert in range(8)]
    assert describe(experts, [*experts, "out"]) == "layer 0"


def test_spans():
    assert spans({3, 0, 2, 7}) == "0, 2-3, 7"
