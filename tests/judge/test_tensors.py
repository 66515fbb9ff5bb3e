"""Per-tensor evidence: which tensor is wrong, at which step, whatever loss and norm say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_examples import (
    PARAMETERS,
    REPLICAS,
    SAMPLES,
    in_force,
    judge,
    run,
    samples,
    sketch,
    spec,
)

from converge_harness.judge import calibrate
from converge_harness.judge.compare.sketches import fit, gradient_difference, shared_samples
from converge_harness.judge.compare.tensors import compare_tensors
from converge_harness.model import (
    Disagreement,
    Judgement,
    Outcome,
    PostStepState,
    Precision,
    ReplicaSample,
)

CONTROL = run()
SPEC = spec()
WQ, NORM, EMBEDDING = PARAMETERS


def judged(test, calibration=None, **more):
    return judge(test, CONTROL, calibration, spec=SPEC, control_spec=SPEC, **more)


def answer(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


def only(tensor, change, at=lambda step: True):
    return lambda step, name, values: change(values) if name == tensor and at(step) else values


def with_samples(**changes):
    return replace(run("t"), samples=samples(**changes))


def jittered(size, seed):
    """Gradients and updates that each differ from the control's by about ``size``."""
    draw = np.random.default_rng(seed)

    def jitter(step, name, values):
        return values * (1 + size * draw.standard_normal(values.shape))

    return {"gradient": jitter, "update": jitter}


# check, what is wrong with the run, step of onset, tensor that stands out
WRONG = {
    "a gradient twice as large": (
        "gradients-first-steps",
        {"gradient": only(WQ, lambda x: 2 * x)},
        1,
        WQ,
    ),
    "a gradient of another direction and the same norm": (
        "gradients-first-steps",
        {"gradient": only(NORM, np.flip)},
        1,
        NORM,
    ),
    "one entry of a gradient": (
        "gradients-first-steps",
        {"gradient": only(EMBEDDING, lambda x: np.r_[-x[:1], x[1:]], at=lambda step: step == 2)},
        2,
        EMBEDDING,
    ),
    "a parameter that does not move": (
        "updates-first-steps",
        {"update": only(NORM, np.zeros_like)},
        1,
        NORM,
    ),
    "a learning rate of one tensor": (
        "updates-first-steps",
        {"update": only(WQ, lambda x: 1.1 * x)},
        1,
        WQ,
    ),
    "weights that were not loaded": (
        "same-initial-parameters",
        {"initial": lambda name, values: values + 1e-6 * (name == NORM)},
        0,
        NORM,
    ),
    "a gradient that goes wrong later": (
        "gradients-envelope",
        {"gradient": only(WQ, lambda x: 2 * x, at=lambda step: step == 8)},
        8,
        WQ,
    ),
    "an optimizer that loses its state later": (
        "updates-envelope",
        {"update": only(WQ, lambda x: -x, at=lambda step: step == 16)},
        16,
        WQ,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tensor_fails_by_name_and_step(case):
    name, changes, onset, tensor = WRONG[case]
    verdict = judged(with_samples(**changes))
    check = answer(verdict, name)
    assert verdict.judgement is Judgement.FAIL
    assert (check.outcome, check.onset) == (Outcome.FAIL, onset)
    assert check.deviations[0].tensor == tensor
    assert check.deviations[0].measured > check.deviations[0].limit
    assert tensor in check.detail


def test_the_order_of_names_does_not_matter():
    def shuffled(sample):
        order = [2, 0, 1]

        def rows(old):
            return old and type(old)(*(getattr(old, field)[order] for field in old.__slots__))

        return replace(
            sample,
            names=tuple(sample.names[i] for i in order),
            sizes=sample.sizes[order],
            parameters=rows(sample.parameters),
            gradients=rows(sample.gradients),
            post_step=sample.post_step
            and PostStepState(
                sample.post_step.clipped_norm[order],
                sample.post_step.states,
                sample.post_step.state_norm[order],
                sample.post_step.state_steps[order],
            ),
        )

    test = replace(run("t"), samples=tuple(map(shuffled, SAMPLES)))
    assert judged(test).judgement is Judgement.PASS


def test_rounding_passes_and_is_measured():
    verdict = judged(with_samples(**jittered(1e-7, seed=1)))
    check = answer(verdict, "gradients-first-steps")
    assert verdict.judgement is Judgement.PASS
    assert 1e-8 < check.measured < 1e-6


def test_repeats_decide_how_near_a_gradient_has_to_be():
    off = with_samples(gradient=only(WQ, lambda x: x * (1 + 8e-6)))
    assert judged(off).judgement is Judgement.PASS  # below the floor without repeats

    def learnt(size):
        repeats = [with_samples(**jittered(size, seed)) for seed in range(5)]
        return calibrate(CONTROL, [wobbly(repeat) for repeat in repeats])

    verdict = judged(off, learnt(1e-9))
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, 1)
    verdict = judged(off, learnt(5e-6))
    assert verdict.judgement is Judgement.PASS
    assert "spread of 5 repeats" in answer(verdict, "gradients-first-steps").limit.origin


def wobbly(repeat):
    """A repeat whose curves differ a little, too: bit-identical ones teach nothing."""
    norms = repeat.signals["grad_norm"].values * (1 + 1e-12)
    return replace(repeat, signals={**repeat.signals, "grad_norm": norms})


def test_a_tensor_that_is_not_there_is_never_excused():
    repeats = [wobbly(with_samples(**jittered(5.0, seed))) for seed in range(5)]
    gone = with_samples(update=only(NORM, np.zeros_like))
    verdict = judged(gone, calibrate(CONTROL, repeats))
    assert answer(verdict, "updates-first-steps").outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("apart", "gradient", "outcome"),
    [
        (0.5, lambda x: -2 * x, Outcome.PASS),
        (0.5, np.zeros_like, Outcome.FAIL),
        (0.01, lambda x: -2 * x, Outcome.FAIL),
    ],
)
def test_where_repeats_part_as_far_only_what_is_not_there_is_wrong(apart, gradient, outcome):
    late = SAMPLES[-1].step

    def repeat(seed):
        def apart_late(step, name, values):
            draw = np.random.default_rng(seed).standard_normal(values.shape)
            return values * (1 + (apart if step == late else 1e-9) * draw)

        return wobbly(with_samples(gradient=apart_late))

    calibration = calibrate(CONTROL, [repeat(seed) for seed in range(5)])
    test = with_samples(gradient=only(WQ, gradient, at=lambda step: step == late))
    check = answer(judged(test, calibration), "gradients-envelope")
    assert check.outcome is outcome
    if outcome is Outcome.PASS:
        assert "differ as much between repeats of the control" in check.detail


def test_coarser_precisions_have_coarser_floors():
    test = with_samples(**jittered(2e-2, seed=3))
    assert judged(test).judgement is Judgement.FAIL
    coarse = replace(test, precision=Precision.FLOAT8)
    assert answer(judged(coarse), "gradients-first-steps").outcome is Outcome.PASS


# ------------------------------------------------------------- broken evidence


def nan_gradient(step, name, values):
    return np.where(np.arange(values.size) == 3, np.nan, values) if name == WQ else values


def test_an_entry_that_is_not_finite_fails_unless_the_control_has_it_too():
    test = with_samples(gradient=nan_gradient)
    check = answer(judged(test), "gradients-finite")
    assert (check.outcome, check.onset, check.measured) == (Outcome.FAIL, 1, 1.0)
    assert WQ in check.detail
    both = replace(CONTROL, samples=test.samples)
    verdict = judge(test, both, spec=SPEC, control_spec=SPEC)
    assert answer(verdict, "gradients-finite").outcome is Outcome.PASS
    assert verdict.judgement is Judgement.FAIL  # NaN still agrees with nothing


def test_a_tensor_that_could_not_be_counted_is_not_called_infinite():
    sampled = with_samples(gradient=nan_gradient)
    steps = [sample.step for sample in sampled.samples if sample.gradients is not None]
    partial = "gradient is an unreduced partial sum"
    told = replace(
        sampled,
        problems=tuple(f"step {step}: {WQ}: {partial}" for step in steps),
        uncounted=frozenset((step, WQ) for step in steps),
    )
    assert answer(judged(told), "gradients-finite").outcome is Outcome.PASS
    assert answer(judged(told), "samples-whole").outcome is Outcome.INVALID
    assert answer(judged(told), "gradients-first-steps").outcome is not Outcome.FAIL
    other = replace(told, uncounted=frozenset({(1, f"another.{WQ}")}))
    assert answer(judged(other), "gradients-finite").outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": ()}, "no sample of its parameters at step 0"),
        ({"samples": SAMPLES[:3]}, "no sample of its parameters at step 4"),
        ({"replicas": REPLICAS[1:]}, "no sample of its replicas at step 0"),
        ({"sample_steps": (0, 1)}, "at different steps"),
        ({"problems": ("step 3: a gradient is a partial sum",)}, "partial sum"),
    ],
)
def test_samples_that_were_asked_for_and_are_not_there_are_invalid(changes, words):
    check = answer(judged(replace(run("t"), **changes)), "samples-whole")
    assert check.outcome is Outcome.INVALID
    assert words in check.detail


def test_a_sample_that_lacks_a_tensor_later_on_is_invalid():
    def cut(sample):
        def rows(old):
            return old and type(old)(*(getattr(old, field)[1:] for field in old.__slots__))

        names, sizes = sample.names[1:], sample.sizes[1:]
        kept = {"parameters": rows(sample.parameters), "gradients": rows(sample.gradients)}
        return replace(sample, names=names, sizes=sizes, **kept)

    test = replace(run("t"), samples=(*SAMPLES[:3], *map(cut, SAMPLES[3:])))
    verdict = judged(test)
    assert verdict.judgement is Judgement.INVALID
    assert answer(verdict, "same-parameters").onset == 4


@pytest.mark.parametrize("side", ["test", "control"])
def test_a_run_that_does_not_tell_when_it_sampled_is_invalid(side):
    silent = replace(run("t"), sample_steps=None)
    test, control = (silent, CONTROL) if side == "test" else (CONTROL, silent)
    verdict = judge(test, control, spec=SPEC, control_spec=SPEC)
    assert answer(verdict, "samples-whole").outcome is Outcome.INVALID


def test_samples_without_gradients_are_invalid():
    test = replace(run("t"), samples=tuple(replace(each, gradients=None) for each in SAMPLES))
    assert answer(judged(test), "samples-whole").outcome is Outcome.INVALID


BF16_STORED = replace(CONTROL.in_force, param_dtype="bfloat16")


def test_an_update_is_judged_by_what_parameters_are_stored_in_not_computed_in():
    still = with_samples(update=only(WQ, np.zeros_like))
    mixed = replace(still, precision=Precision.BF16)
    assert answer(judged(mixed), "updates-first-steps").outcome is Outcome.FAIL
    stored = replace(mixed, in_force=BF16_STORED)
    small = replace(CONTROL, samples=samples(update=lambda step, name, values: values / 4))
    verdict = judge(stored, small, spec=SPEC, control_spec=SPEC)
    check = answer(verdict, "updates-first-steps")
    assert check.outcome is Outcome.SKIPPED  # a quarter of a space between two numbers
    assert "lost in the spacing" in check.detail


def test_another_model_is_invalid():
    def renamed(sample):
        return replace(sample, names=("layers.0.attention.wk.weight", *sample.names[1:]))

    test = replace(run("t"), samples=tuple(map(renamed, SAMPLES)))
    verdict = judged(test)
    assert verdict.judgement is Judgement.INVALID
    assert "layers.0.attention.wk.weight" in answer(verdict, "same-parameters").detail


def test_with_the_cadence_off_nothing_is_asked_for():
    off = {"samples": (), "replicas": (), "sample_steps": ()}
    verdict = judge(replace(run("t"), **off), replace(CONTROL, **off), spec=SPEC, control_spec=SPEC)
    assert verdict.judgement is Judgement.PASS
    assert answer(verdict, "samples-whole").outcome is Outcome.SKIPPED


# ------------------------------------------------------------------- replicas

DRIFTED = ReplicaSample(
    1, {"parameter": 3}, (Disagreement("parameter", NORM, ("tp",), ((0, 2), (1, 3))),), 1
)


def test_replicas_that_differ_fail_with_tensor_and_mesh_dimension():
    test = replace(run("t"), replicas=(REPLICAS[0], DRIFTED, *REPLICAS[2:]))
    verdict = judged(test)
    check = answer(verdict, "replicas-agree")
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, 1)
    assert check.detail == f"t has replicas that differ at step 1: parameter {NORM} along tp"


def test_replicas_that_must_be_there_and_were_not_compared_are_invalid():
    ddp = replace(CONTROL.in_force, degrees={"dp_replicate": 2, "dp_shard": 1})
    empty = tuple(ReplicaSample(sample.step, {}) for sample in REPLICAS)
    check = answer(judged(replace(run("t"), in_force=ddp, replicas=empty)), "replicas-agree")
    assert (check.outcome, check.onset) == (Outcome.INVALID, 0)
    assert answer(judged(replace(run("t"), replicas=empty)), "replicas-agree").outcome is (
        Outcome.PASS
    )


def test_a_control_whose_replicas_differ_judges_nothing():
    control = replace(CONTROL, replicas=(REPLICAS[0], DRIFTED, *REPLICAS[2:]))
    verdict = judge(run("t"), control, spec=SPEC, control_spec=SPEC)
    assert verdict.judgement is Judgement.INVALID
    assert "replicas that differ" in verdict.cause


# ------------------------------------------------------------------- sketches


@given(st.floats(-1e3, 1e3).filter(lambda factor: abs(factor) > 1e-3))
def test_a_pure_scale_is_found_exactly(factor):
    values = np.random.default_rng(0).standard_normal(50)
    found = fit(factor * sketch(WQ, np.resize(values, 64)), sketch(WQ, np.resize(values, 64)))
    assert found.factor == pytest.approx(factor)
    assert found.residual == pytest.approx(0, abs=1e-12)


def test_a_fit_of_another_direction_leaves_nearly_everything():
    first, second = np.random.default_rng(0).standard_normal((2, 64))
    assert fit(first, second).residual > 0.9
    assert fit(first, np.zeros(64)).residual == np.inf


def test_two_samples_share_only_steps_that_both_have():
    test = replace(run("t"), samples=(SAMPLES[0], SAMPLES[2]))
    pairs = shared_samples(test, CONTROL)
    assert [theirs.step for _, theirs in pairs] == [0, 2]
    assert not gradient_difference(*pairs[1]).any()


def fallen(off, *, stored="bfloat16", control_stored="float32", step=8, share=0.25):
    """Names of gradients outside of their limits at a step at which all have fallen to a share.

    The test set's are ``off`` times longer than the control's there.
    """

    def small(at, name, values):
        return values * share if at == step else values

    def longer(at, name, values):
        return small(at, name, values) * (1 + off if at == step else 1)

    def trained(name, gradient, dtype):
        precision = Precision.BF16 if dtype == "bfloat16" else Precision.FP32
        force = in_force(param_dtype=dtype)
        return run(name, samples=samples(gradient=gradient), precision=precision, in_force=force)

    test, control = trained("t", longer, stored), trained("control", small, control_stored)
    (found,) = [each for each in compare_tensors(test, control, None) if each.step == step]
    return {found.names[index] for index in found.gradients.outside}


def test_a_gradient_that_has_fallen_is_measured_by_what_it_was_where_bf16_loses_updates():
    assert fallen(0.85) == set()
    assert fallen(1.2) == set(PARAMETERS)
    assert fallen(-0.55) == set(PARAMETERS)  # half of it
    assert fallen(0.85, share=1.0) == set(PARAMETERS)  # it has not fallen
    assert fallen(0.3, step=2) == set(PARAMETERS)  # nothing was lost before
    assert fallen(0.85, control_stored="bfloat16") == set(PARAMETERS)
    assert fallen(0.85, stored="float32", control_stored="bfloat16") == set(PARAMETERS)


def test_a_gradient_that_was_not_a_number_once_widens_nothing():
    def broken(runs_samples):
        start, first, *rest = runs_samples
        norm = np.full_like(first.gradients.norm, np.inf)
        return (start, replace(first, gradients=replace(first.gradients, norm=norm)), *rest)

    control = run("control", samples=broken(SAMPLES))
    force = in_force(param_dtype="bfloat16")
    test = run("t", samples=broken(SAMPLES), precision=Precision.BF16, in_force=force)
    as_before = run("t", samples=SAMPLES, precision=Precision.BF16, in_force=force)
    pairs = zip(
        compare_tensors(test, control, None), compare_tensors(as_before, CONTROL, None), strict=True
    )
    for one, other in list(pairs)[2:]:
        assert (one.gradients.limit <= other.gradients.limit).all()
