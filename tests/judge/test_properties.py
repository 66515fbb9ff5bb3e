"""What must hold for any curves: closed on broken evidence, symmetric, monotone, never crashing."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from judge_examples import STEPS, foreign, judge, run, spec, truncated, with_signals

from converge_harness.judge import CHECKS, calibrate
from converge_harness.judge.checks.question import check
from converge_harness.model import JUDGED_SIGNALS, Judgement, Outcome, Parallelism, Tier

CONTROL = run()
SPEC = spec()
SEVERITY = list(Judgement)
UNHURRIED = settings(deadline=None)  # the machine may be busy training
SIGNALS = st.sampled_from([*JUDGED_SIGNALS, "lr", "tokens"])
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
HOLES = st.sampled_from([None, math.nan, math.inf, -math.inf])


def judged(test, control=CONTROL, **more):
    return judge(test, control, spec=SPEC, control_spec=SPEC, **more)


@UNHURRIED
@given(SIGNALS, st.integers(1, STEPS), HOLES, st.booleans())
def test_a_hole_anywhere_on_either_side_never_passes(signal, at, hole, in_control):
    broken = with_signals(CONTROL, **{signal: lambda step, x: hole if step == at else x})
    verdict = judged(CONTROL, broken) if in_control else judged(broken)
    assert verdict.judgement in (Judgement.FAIL, Judgement.INVALID)
    assert verdict.cause


@UNHURRIED
@given(st.integers(0, STEPS - 1), st.integers(0, STEPS - 1))
def test_a_truncation_anywhere_never_passes(ours, theirs):
    cut, other = truncated(CONTROL, ours), truncated(CONTROL, theirs)
    assert judged(cut).judgement is Judgement.INVALID
    assert judged(CONTROL, other).judgement is Judgement.INVALID
    assert judged(cut, other).judgement is Judgement.INVALID


@UNHURRIED
@given(st.integers(1, STEPS - 1))
def test_foreign_curves_of_different_length_never_pass(kept):
    whole = foreign("a", loss=CONTROL.signals["loss"], grad_norm=CONTROL.signals["grad_norm"])
    cut = replace(truncated(whole, kept), complete=True)
    assert judge(cut, whole).judgement is Judgement.INVALID
    assert judge(whole, cut).judgement is Judgement.INVALID


@UNHURRIED
@given(
    st.integers(2, 64),
    st.sampled_from(["dp_replicate", "tp", "cp", "pp"]),
    st.booleans(),
)
def test_gradients_scaled_by_a_degree_fail_and_the_degree_is_named(degree, dimension, divided):
    factor = 1 / degree if divided else degree
    test = run("t", Parallelism(**{dimension: degree}))
    test = with_signals(
        test,
        grad_norm=lambda step, x: x * factor,
        grad_norm_recomputed=lambda step, x: x * factor,
    )
    verdict = judge(test, CONTROL)
    assert verdict.judgement is Judgement.FAIL
    name = {"dp_replicate": "replicate"}.get(dimension, dimension.upper())
    assert f"the {name} degree ({degree})" in verdict.cause


@UNHURRIED
@given(st.floats(0.01, 100).filter(lambda factor: abs(factor - 1) > 1e-3))
def test_gradients_scaled_by_anything_fail(factor):
    test = with_signals(
        CONTROL,
        grad_norm=lambda step, x: x * factor,
        grad_norm_recomputed=lambda step, x: x * factor,
    )
    assert judged(test).judgement is Judgement.FAIL


POSITIVE = st.floats(1e-3, 1e3)
CURVE = st.lists(POSITIVE, min_size=3, max_size=8)


@UNHURRIED
@given(CURVE, CURVE)
def test_identical_curves_pass(loss, norm):
    size = min(len(loss), len(norm))
    assume(len(set(loss[:size])) > 1)  # a loss that stands still is INVALID
    curves = foreign("a", loss=tuple(loss[:size]), grad_norm=tuple(norm[:size]))
    assert judge(curves, curves).judgement is Judgement.PASS


@st.composite
def two_runs(draw):
    first = draw(CURVE.filter(lambda losses: len(set(losses)) > 1))
    noise = draw(st.floats(0, 1e-5))
    signs = draw(st.lists(st.floats(-1, 1), min_size=len(first), max_size=len(first)))
    second = tuple(x * (1 + noise * sign) for x, sign in zip(first, signs, strict=True))
    return foreign("a", loss=tuple(first)), foreign("b", loss=second)


@UNHURRIED
@given(two_runs())
def test_without_repeats_the_two_sides_are_alike(runs):
    first, second = runs
    there, back = judge(first, second), judge(second, first)
    assert (there.judgement, there.onset_step) == (back.judgement, back.onset_step)


@UNHURRIED
@given(two_runs(), st.floats(0, 1e-4), st.floats(0, 1e-4))
def test_loosening_a_tolerance_never_makes_it_worse(runs, one, other):
    tight, loose = sorted((one, other))
    strict = judge(*runs, tolerances={"loss": tight}).judgement
    lenient = judge(*runs, tolerances={"loss": loose}).judgement
    assert SEVERITY.index(lenient) <= SEVERITY.index(strict)


@UNHURRIED
@given(two_runs(), st.floats(0, 1e-4), st.floats(0, 1e-4))
def test_repeats_that_differ_more_never_make_it_worse(runs, one, other):
    test, control = runs

    def verdict(size):
        repeats = [
            with_signals(control, loss=lambda step, x, s=sign: x * (1 + s * size))
            for sign in (-1, 1, 1)
        ]
        return judge(test, control, calibrate(control, repeats)).judgement

    quiet, loud = sorted((one, other))
    assume(quiet > 1e-12)  # bit-identical repeats teach nothing: floors without them are wider
    assert SEVERITY.index(verdict(loud)) <= SEVERITY.index(verdict(quiet))


VALUES = st.lists(st.one_of(st.none(), ANY_FLOAT), max_size=6)


@settings(max_examples=300)
@given(VALUES, VALUES, VALUES, VALUES, st.lists(st.integers(-1, 5), max_size=6))
@example([0.5], [], [9e307, 0.0], [0.5], [1])
@example([0.5], [], [6.4e307, 0.0], [], [0])
@example([0.0], [], [1.0, 0.0], [0.0], [1])
def test_any_curves_at_all_give_a_verdict_with_a_cause(loss, norm, loss2, norm2, steps):
    test = foreign("a", loss=tuple(loss), grad_norm=tuple(norm), loss_recomputed=tuple(norm2))
    control = foreign("b", loss=tuple(loss2), grad_norm=tuple(norm2), loss_recomputed=tuple(loss))
    test = replace(test, steps=tuple(steps))
    for pair in ((test, control), (control, test), (test, test), (control, control)):
        verdict = judge(*pair)
        assert bool(verdict.cause) == (verdict.judgement is not Judgement.PASS)


# ---------------------------------------------------------------- registry


def test_slugs_are_part_of_the_interface():
    assert [question.name for question in CHECKS] == [
        "control-sound",
        "repeats-sound",
        "complete",
        "steps-increase",
        "values-present",
        "finite",
        "something-trained",
        "same-steps",
        "same-numbering",
        "same-means",
        "same-data",
        "ranks-see-same-batch",
        "same-tokens",
        "same-lr",
        "config-differs-as-declared",
        "control-in-force",
        "named-in-force",
        "nothing-unnamed",
        "probed-alike",
        "loss-first-step",
        "grad-norm-first-step",
        "loss-recomputed-first-step",
        "grad-norm-recomputed-first-step",
        "reported-loss-is-recomputed",
        "reported-grad-norm-is-recomputed",
        "gradients-present",
        "samples-whole",
        "same-parameters",
        "starts-as-the-control",
        "reference-sound",
        "gradient-errors",
        "gradient-scale",
        "frozen-loss",
        "same-initial-parameters",
        "renamed-parameters-agree",
        "gradients-first-steps",
        "updates-first-steps",
        "gradients-finite",
        "replicas-agree",
        "gradients-envelope",
        "updates-envelope",
        "clipping-first-steps",
        "optimizer-steps",
        "optimizer-state-first-steps",
        "buffers-first-steps",
        "clipping-envelope",
        "optimizer-state-envelope",
        "buffers-envelope",
        "loss-envelope",
        "grad-norm-envelope",
        "loss-recomputed-envelope",
        "grad-norm-recomputed-envelope",
        "random-numbers-go-on",
        "ranks-draw-apart",
        "dropout-masks-differ",
        "loss-equivalent",
        "passes-continuous",
        "state-restored",
        "data-resumed",
        "replays-agree",
        "segments-as-scheduled",
        "faults-struck",
        "recovers-in-time",
        "torn-never-loaded",
    ]


def test_every_check_explains_itself():
    for question in CHECKS:
        assert question.title.endswith(".")
    assert len({question.title for question in CHECKS}) == len(CHECKS)


def test_a_check_without_a_docstring_is_refused():
    def silent(test):
        raise NotImplementedError

    with pytest.raises(TypeError, match="silent has no docstring"):
        check(Tier.INTEGRITY)(silent)


def test_the_reports_sentence_is_the_docstring():
    verdict = judged(CONTROL)
    # The resume tier is asked of runs that were resumed (test_resume.py).
    asked = [question for question in CHECKS if question.tier is not Tier.RESUME]
    titles = {question.name: question.title for question in asked}
    assert {answer.name: answer.title for answer in verdict.checks} == titles
    assert all(answer.outcome is not Outcome.FAIL for answer in verdict.checks)
