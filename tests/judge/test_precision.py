"""Errors of low precision against a float32 reference: correct set-ups, faults of each kind."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from judge_examples import STEPS, judge, run, spec

from converge_harness.judge import PrecisionRuns
from converge_harness.judge.causes.low_precision import _worst
from converge_harness.judge.compare.floors import SPACING
from converge_harness.judge.compare.precision_errors import (
    ROUNDED_ALIKE,
    Errors,
    measure_errors,
)
from converge_harness.model import (
    CauseClass,
    Evidence,
    FrozenSamples,
    Judgement,
    Outcome,
    Precision,
    RunStatus,
)
from converge_harness.trainers.torchtitan import TORCHTITAN

BATCHES, ENTRIES = 16, 4096
NAMES = (
    *sorted(f"layers.{layer}.wq.weight" for layer in range(11)),
    "tok_embeddings.weight",
)
ROUNDING = 6e-3
NUMBERS = np.random.default_rng(7)
TRUTH = NUMBERS.standard_normal((BATCHES, len(NAMES), ENTRIES))
SIGNS = {name: np.random.default_rng(list(name.encode())) for name in NAMES}
PROJECTIONS = np.stack(
    [SIGNS[name].choice([-1.0, 1.0], (ENTRIES, 64)) / 8 for name in NAMES]
)  # (parameters, entries, k)
LOSS = 6.25 + 0.01 * np.arange(BATCHES)


def frozen(gradients, loss=LOSS, **changes) -> FrozenSamples:
    samples = FrozenSamples(
        names=NAMES,
        sizes=np.full(len(NAMES), ENTRIES),
        sketch=np.einsum("bpe,pek->bpk", gradients, PROJECTIONS),
        norm=np.linalg.norm(gradients, axis=-1),
        loss=np.asarray(loss),
        batch_digests=tuple(f"{batch:016x}" for batch in range(BATCHES)),
    )
    return replace(samples, **changes)


def rounded(seed: int, size: float = ROUNDING):
    noise = np.random.default_rng(seed).standard_normal(TRUTH.shape)
    return TRUTH + size * noise


def rounded_loss(seed: int):
    return LOSS * (1 + 2e-5 * np.random.default_rng(seed).standard_normal(BATCHES))


def low(name: str, samples: FrozenSamples | None, **changes) -> Evidence:
    return replace(
        run(name), precision=Precision.BF16, frozen=samples, frozen_steps=BATCHES, **changes
    )


REFERENCE = replace(low("fsdp2.float32", frozen(TRUTH)), precision=Precision.FP32)
MATCHED = low("fsdp2", frozen(rounded(1), rounded_loss(1)))
MEASURE = PrecisionRuns(MATCHED, REFERENCE)


def verdict(test: Evidence, measure: PrecisionRuns | None = MEASURE):
    return judge(test, MATCHED, spec=spec(test.name), control_spec=spec(), measure=measure)


def outcomes(found):
    names = ("reference-sound", "gradient-errors", "gradient-scale", "frozen-loss")
    by_name = {check.name: check.outcome.value for check in found.checks}
    return [by_name[name] for name in names]


@pytest.mark.parametrize("seed", range(20))
def test_another_rounding_passes(seed):
    found = verdict(low("tp2", frozen(rounded(100 + seed), rounded_loss(100 + seed))))
    assert found.judgement is Judgement.PASS, found.cause
    assert outcomes(found) == ["PASS"] * 4


def test_an_error_of_a_few_roundings_in_one_gradient_fails_and_is_named():
    gradients = rounded(2)
    gradients[:, 3] += 2 * ROUNDING * np.random.default_rng(5).standard_normal((BATCHES, ENTRIES))
    found = verdict(low("tp2", frozen(gradients, rounded_loss(2))))
    assert outcomes(found) == ["PASS", "FAIL", "PASS", "PASS"]
    assert found.cause_class is CauseClass.GRADIENT_DIRECTION
    assert NAMES[3] in found.cause
    assert found.onset_step == 1


def test_a_fault_on_one_batch_of_sixteen_is_seen():
    """Data that the first step does not have: a document boundary, say."""
    gradients = rounded(2)
    gradients[9] += 0.1 * np.random.default_rng(5).standard_normal((len(NAMES), ENTRIES))
    assert outcomes(verdict(low("tp2", frozen(gradients, rounded_loss(2)))))[1] == "FAIL"
    alone = replace(
        frozen(gradients),
        **{key: getattr(frozen(gradients), key)[:1] for key in ("sketch", "norm")},
    )
    assert np.allclose(alone.sketch, frozen(rounded(2)).sketch[:1])


def test_a_scale_far_below_the_error_of_a_gradient_fails_and_is_named():
    found = verdict(low("ddp2", frozen(1.001 * rounded(2), rounded_loss(2))))
    assert outcomes(found) == ["PASS", "PASS", "FAIL", "PASS"]
    assert found.cause_class is CauseClass.GRADIENT_SCALE
    assert "scaled by 1.00" in found.cause


ONLY_THE_FIRST = np.array([name == NAMES[0] for name in NAMES], dtype=float)[:, None]


@pytest.mark.parametrize(
    ("factor", "loss", "expected"),
    [
        (1.0, 1.0, ["PASS", "PASS", "PASS", "PASS"]),
        (1.0, 1 + 2.2e-16, ["PASS", "PASS", "PASS", "PASS"]),
        (1.006, 1.0, ["PASS", "PASS", "FAIL", "PASS"]),
        (1.0, 1 + 2e-6, ["PASS", "PASS", "PASS", "FAIL"]),
    ],
)
def test_a_model_with_one_gradient_may_be_rounded(factor, loss, expected):
    """As Muse Glimmer, whose output projection starts at zero: its loss is that of guessing."""
    reference = replace(REFERENCE, frozen=frozen(TRUTH * ONLY_THE_FIRST))
    matched = low("fsdp2", frozen(rounded(1) * ONLY_THE_FIRST))
    test = low("tp2", frozen(rounded(2) * ONLY_THE_FIRST * factor, LOSS * loss))
    measure = PrecisionRuns(matched, reference)
    found = judge(test, matched, spec=spec("tp2"), control_spec=spec(), measure=measure)
    assert outcomes(found) == expected


def of_some(count, factors=1.0):
    """A test set's errors where only so many gradients are not zero, scaled batch by batch."""
    some = np.arange(len(NAMES))[:, None] < count
    reference = replace(REFERENCE, frozen=frozen(TRUTH * some))
    matched = low("fsdp2", frozen(rounded(1) * some))
    scaled = np.broadcast_to(np.asarray(factors, dtype=float), BATCHES)[:, None, None]
    test = low("tp2", frozen(rounded(2) * some * scaled))
    return measure_errors(test, PrecisionRuns(matched, reference))


@pytest.mark.parametrize("count", [1, 2, 5, 8, len(NAMES)])
def test_the_mean_scale_is_that_of_gradients_that_are_not_zero(count):
    varying = np.where(np.arange(BATCHES) % 2, 1.01, 0.99)
    for factors, off in ((1.0, False), (1.01, True), (varying, True)):
        errors = of_some(count, factors)
        assert np.count_nonzero(errors.rounded) == count
        assert errors.all_scaled == off
        assert any(measured > limit for measured, limit in errors.scales_of_all) == off
    assert of_some(count, 1.01).scale_of_rounded.mean() == pytest.approx(0.00995, rel=0.05)


def test_a_scale_that_varies_by_batch_is_another_average():
    factors = 1 + 1e-3 * np.where(np.arange(BATCHES) % 2, 1.0, -1.0)
    found = verdict(low("dp2", frozen(factors[:, None, None] * rounded(2), rounded_loss(2))))
    assert outcomes(found) == ["PASS", "PASS", "FAIL", "PASS"]
    assert found.cause_class is CauseClass.OBJECTIVE
    assert "varies from batch to batch" in found.cause


def with_tokens(evidence: Evidence, tokens) -> Evidence:
    return replace(evidence, signals={**evidence.signals, "tokens": tuple(map(float, tokens))})


BUDGET = 2048
VALID = BUDGET - np.random.default_rng(3).integers(4, 28, STEPS)


@pytest.mark.parametrize("coarse", [0.0, 1.2e-3])
def test_a_scale_that_varies_as_the_valid_tokens_do_is_no_other_average(coarse):
    """Also where the factor is rounded to bfloat16, which moves it by about as much."""
    by = 1 + coarse * np.random.default_rng(4).standard_normal(BATCHES)
    by[1:] *= VALID[1:BATCHES] / VALID[: BATCHES - 1]
    stale = low("dp2", frozen(by[:, None, None] * rounded(2), rounded_loss(2)))
    matched = with_tokens(MATCHED, VALID)
    found = judge(
        with_tokens(stale, VALID),
        matched,
        spec=spec("dp2"),
        control_spec=spec(),
        measure=PrecisionRuns(matched, REFERENCE),
    )
    assert found.cause_class is CauseClass.GRADIENT_SCALE
    assert "which equals the valid tokens over those of the step before" in found.cause
    assert "varies from batch to batch" in found.cause


def test_a_scale_that_varies_otherwise_than_the_valid_tokens_is_another_average():
    factors = 1 + 3e-3 * np.random.default_rng(6).standard_normal(BATCHES)
    other = low("dp2", frozen(factors[:, None, None] * rounded(2), rounded_loss(2)))
    matched = with_tokens(MATCHED, VALID)
    found = judge(
        with_tokens(other, VALID),
        matched,
        spec=spec("dp2"),
        control_spec=spec(),
        measure=PrecisionRuns(matched, REFERENCE),
    )
    assert found.cause_class is CauseClass.OBJECTIVE


def test_a_scale_of_some_parameters_names_them():
    gradients = rounded(2)
    gradients[:, :2] *= 1.05
    found = verdict(low("pp2", frozen(gradients, rounded_loss(2))))
    assert found.cause_class is CauseClass.GROUP_SCALE
    assert "1.05" in found.cause


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(0.87, "PASS"), (0.98, "PASS"), (1.0, "PASS"), (1.15, "FAIL"), (0.75, "FAIL")],
)
def test_a_norm_between_float32_and_a_control_that_rounds_it_away_is_right(factor, expected):
    """A sum in bfloat16 stops growing: a control's gradient is shorter by more than errors turn."""
    shorter, other = rounded(1), rounded(2)
    shorter[:, 3] *= 0.87
    other[:, 3] *= factor
    measure = replace(MEASURE, matched=low("fsdp2", frozen(shorter, rounded_loss(1))))
    found = verdict(low("tp2", frozen(other, rounded_loss(2))), measure)
    assert outcomes(found)[2] == expected


@pytest.mark.parametrize(
    ("shorter", "factor", "expected"),
    [
        ([3], 1.0, "PASS"),
        ([3], 1 - 3.5e-3, "PASS"),  # short by as much
        ([3], 1 + 3.5e-3, "FAIL"),  # beyond float32, by as much
        ([3], 1 - 8e-3, "FAIL"),
        (range(len(NAMES)), 1.0, "FAIL"),  # no parameter is out of line: all are scaled
        ([], 1 + 3.5e-3, "FAIL"),  # the control is right
    ],
)
def test_one_length_that_the_control_alone_rounds_away_is_no_factor_of_all(
    shorter, factor, expected
):
    control, other = rounded(1), rounded(2)
    control[:, list(shorter)] *= 1 - 3.5e-3  # inside the limit of one parameter
    other[:, 3] *= factor
    matched = low("fsdp2", frozen(control, rounded_loss(1)))
    found = verdict(low("tp2", frozen(other, rounded_loss(2))), replace(MEASURE, matched=matched))
    assert outcomes(found)[2] == expected


IN_FLOAT32 = "ddp.grad_reduce_in_fp32"
KEYS = replace(TORCHTITAN.keys, gradients_in_float32=IN_FLOAT32)


def summed(run, *, in_float32, stored="bfloat16"):
    """The run of a trainer that can add up gradients in float32."""
    config = {**run.in_force.config, IN_FLOAT32: in_float32}
    force = replace(run.in_force, param_dtype=stored, config=config, declared=(IN_FLOAT32,))
    return replace(run, in_force=force, keys=KEYS)


@pytest.mark.parametrize(
    ("ours", "theirs", "factor", "expected"),
    [
        (False, True, 1.0018, "PASS"),
        (False, True, 1 / 1.0018, "PASS"),
        (False, True, 1.008, "FAIL"),
        (False, False, 1.0025, "FAIL"),  # the control's are rounded as often
        (True, True, 1.0025, "FAIL"),
        (True, False, 1.0025, "FAIL"),
    ],
)
def test_gradients_that_are_rounded_once_more_may_be_a_little_longer(
    ours, theirs, factor, expected
):
    gradients = rounded(2)
    gradients[::8] *= factor  # the factor that rounds one way is that of some batches
    test = summed(low("accumulation", frozen(gradients, rounded_loss(2))), in_float32=ours)
    matched = summed(MATCHED, in_float32=theirs)
    found = verdict(test, replace(MEASURE, matched=matched))
    assert outcomes(found)[2] == expected


def in_bfloat16(values):
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    return (nearest & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@settings(deadline=None)
@given(factor=st.floats(1, 2), shift=st.integers(-8, 8), seed=st.integers(0, 9))
@example(factor=1 + 1 / 256, shift=0, seed=0)
def test_no_rounding_of_a_multiple_changes_a_length_by_more(factor, shift, seed):
    """The numbers have 8 binary digits, so where they fall between two is no chance."""
    gradient = in_bfloat16(np.random.default_rng(seed).standard_normal(ENTRIES))
    exact = factor * 2.0**shift * gradient
    longer = np.linalg.norm(in_bfloat16(exact)) / np.linalg.norm(exact) - 1
    assert abs(longer) <= ROUNDED_ALIKE * SPACING["bfloat16"]
    if factor == 1 + 1 / 256:
        assert longer > 0.2 * SPACING["bfloat16"]


def test_queries_and_keys_scaled_alike_are_attention_scores_and_not_all_gradients():
    part = {0: "wq", 1: "wk", 10: "wq"}
    names = tuple(name.replace("wq", part.get(at, "wo")) for at, name in enumerate(NAMES))
    measure = PrecisionRuns(
        *(replace(each, frozen=replace(each.frozen, names=names)) for each in (MATCHED, REFERENCE))
    )
    gradients = rounded(2)
    gradients[:, list(part)] *= 1.02
    found = verdict(low("tp2", frozen(gradients, rounded_loss(2), names=names)), measure)
    assert found.cause_class is CauseClass.OBJECTIVE
    assert "gradients of queries and keys alone are scaled by 1.02" in found.cause
    scale = next(check for check in found.checks if check.name == "gradient-scale")
    assert scale.detail.startswith("3 gradients are scaled")
    # Each inside its own limit, and their mean is not that of all.
    gradients[:, list(part)] *= 1.0025 / 1.02
    found = verdict(low("tp2", frozen(gradients, rounded_loss(2), names=names)), measure)
    scale = next(check for check in found.checks if check.name == "gradient-scale")
    assert scale.detail.startswith("3 gradients are scaled")
    assert scale.measured < 1e-3
    assert found.cause_class is CauseClass.OBJECTIVE


PARTS = ("attention.wq", "attention.wk", "attention.wo", "feed_forward.w1", "feed_forward.w2")


def layered(gradients, loss):
    """A test set of two layers, and what it is measured from."""
    names = (*(f"layers.{layer}.{part}.weight" for layer in (0, 1) for part in PARTS), "w", "x")
    measure = PrecisionRuns(
        *(replace(each, frozen=replace(each.frozen, names=names)) for each in (MATCHED, REFERENCE))
    )
    return verdict(low("other", frozen(gradients, loss, names=names)), measure)


ATTENTION = [0, 1, 2, 5, 6, 7]
PROJECTIONS_IN = [0, 1, 5, 6]
MATCHED_LOSS = rounded_loss(1)


@pytest.mark.parametrize(
    ("stored", "microbatches", "outcome"),
    [("bfloat16", 8, "PASS"), ("bfloat16", None, "FAIL"), ("float32", 8, "FAIL")],
)
def test_gradients_in_bfloat16_may_err_more_where_more_parts_are_added_up(
    stored, microbatches, outcome
):
    ran = replace(MATCHED.in_force, param_dtype=stored, pipeline_microbatches=microbatches)
    small = PrecisionRuns(
        low("fsdp2", frozen(rounded(1, 0.3 * ROUNDING), rounded_loss(1))), REFERENCE
    )
    test = low("pp2", frozen(rounded(3, 0.55 * ROUNDING), rounded_loss(3)), in_force=ran)
    assert outcomes(verdict(test, small))[1] == outcome


@pytest.mark.parametrize(
    ("off", "shift", "kind"),
    [
        (ATTENTION, 5e-6, CauseClass.OBJECTIVE),
        (ATTENTION, 0.0, CauseClass.GRADIENT_DIRECTION),  # to the last bit: it is the backward pass
        (PROJECTIONS_IN, 5e-6, CauseClass.GRADIENT_DIRECTION),  # what is computed there is right
        (range(12), 5e-6, CauseClass.OBJECTIVE),
    ],
)
def test_a_forward_pass_that_the_loss_does_not_show_is_no_backward_pass(off, shift, kind):
    gradients = rounded(1)
    noise = np.random.default_rng(5).standard_normal(gradients.shape)
    gradients[:, list(off)] += 5e-2 * noise[:, list(off)]
    found = layered(gradients, MATCHED_LOSS * (1 + shift))
    assert outcomes(found) == ["PASS", "FAIL", "FAIL", "PASS"]  # noise makes gradients longer
    assert found.cause_class is kind
    if off is ATTENTION and kind is CauseClass.OBJECTIVE:
        assert "in the attention of every layer" in found.cause


def test_a_factor_that_is_beyond_rounding_in_every_batch_is_no_direction():
    """As gradients that are divided by all positions, of which a varying share is valid."""
    factors = 1 - 1e-2 * np.random.default_rng(3).uniform(0.6, 1.4, BATCHES)
    found = verdict(low("dp2", frozen(factors[:, None, None] * rounded(2), rounded_loss(2))))
    assert outcomes(found) == ["PASS", "FAIL", "FAIL", "PASS"]
    assert found.cause_class is CauseClass.GRADIENT_SCALE


@pytest.mark.parametrize("shift", [2e-4, -2e-4])
def test_a_loss_that_is_off_on_every_batch_is_the_forward_pass(shift):
    found = verdict(low("cp2", frozen(rounded(2), rounded_loss(2) * (1 + shift))))
    assert outcomes(found) == ["PASS", "PASS", "PASS", "FAIL"]
    assert found.cause_class is CauseClass.OBJECTIVE


def test_an_embedding_may_err_more_where_more_tokens_are_added_up_at_once():
    gradients = rounded(2)
    gradients[:, -1] += (
        1.5 * ROUNDING * np.random.default_rng(5).standard_normal((BATCHES, ENTRIES))
    )
    test = low("one", frozen(gradients, rounded_loss(2)))
    assert outcomes(verdict(test))[1] == "FAIL"
    of_more = replace(test, in_force=replace(test.in_force, local_batch_size=8))
    errors = measure_errors(of_more, MEASURE)
    assert errors.ratio[-1] < errors.multiple[-1] == pytest.approx(2 * errors.multiple[0])


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (PrecisionRuns(MATCHED, replace(REFERENCE, status=RunStatus.CRASHED)), "crashed"),
        (PrecisionRuns(replace(MATCHED, complete=False), REFERENCE), "ended early"),
        (PrecisionRuns(MATCHED, replace(REFERENCE, frozen=None)), "left 0 of 16 frozen steps"),
        (
            PrecisionRuns(
                MATCHED,
                replace(REFERENCE, frozen=frozen(TRUTH, batch_digests=("0" * 16,) * BATCHES)),
            ),
            "other samples",
        ),
        (
            PrecisionRuns(
                MATCHED, replace(REFERENCE, frozen=frozen(TRUTH, problems=("wq: partial",)))
            ),
            "could not be measured",
        ),
        (
            PrecisionRuns(MATCHED, replace(REFERENCE, frozen=frozen(TRUTH, names=NAMES[::-1]))),
            "other parameters",
        ),
        (PrecisionRuns(MATCHED, replace(REFERENCE, frozen_steps=8)), "other frozen steps"),
    ],
)
def test_a_broken_measure_is_invalid_with_the_way_out(measure, words):
    found = verdict(low("tp2", frozen(rounded(2), rounded_loss(2))), measure)
    assert found.judgement is Judgement.INVALID
    assert words in found.cause
    assert "reference = false" in found.cause or "other parameters" in found.cause


def test_a_test_set_that_left_no_frozen_steps_is_invalid():
    found = verdict(low("tp2", None))
    assert found.judgement is Judgement.INVALID
    assert "tp2 left 0 of 16 frozen steps" in found.cause


def test_gradients_that_are_not_finite_never_pass():
    gradients = rounded(2)
    gradients[4, 0, 0] = np.nan
    found = verdict(low("tp2", frozen(gradients, rounded_loss(2))))
    assert found.judgement is Judgement.FAIL
    loss = rounded_loss(2)
    loss[3] = np.nan
    assert outcomes(verdict(low("tp2", frozen(rounded(2), loss))))[3] == "FAIL"


def test_without_a_reference_nothing_is_measured_and_the_check_says_so():
    test = replace(low("tp2", None), frozen_steps=0)
    found = verdict(test, None)
    assert outcomes(found) == ["SKIPPED"] * 4
    assert found.judgement is Judgement.PASS


def test_the_first_step_alone_is_measured_without_frozen_steps():
    runs = [replace(each, frozen=None, frozen_steps=0) for each in (MATCHED, REFERENCE)]
    test = replace(run("tp2"), precision=Precision.BF16)
    found = judge(
        test, runs[0], spec=spec("tp2"), control_spec=spec(), measure=PrecisionRuns(*runs)
    )
    by_name = {check.name: check for check in found.checks}
    assert by_name["gradient-errors"].outcome is Outcome.PASS
    assert "the first step" in by_name["gradient-errors"].detail
    assert by_name["frozen-loss"].outcome is Outcome.SKIPPED


# ----------------------------------------------------- random numbers of a set's own

DRAWN = 0.3
"""How far drawing moves a gradient, of its norm."""


def drawing(seed: int, size: float = DRAWN, factor=1.0) -> FrozenSamples:
    """Frozen steps of a run that draws: other noise in every pass, also over the same batch."""
    numbers = np.random.default_rng(1000 + seed)
    gradients = factor * (TRUTH + size * numbers.standard_normal(TRUTH.shape))
    other = factor * (TRUTH[0] + size * numbers.standard_normal(TRUTH[0].shape))
    loss = LOSS * (1 + 1e-3 * numbers.standard_normal(BATCHES))
    again = np.einsum("pe,pek->pk", other, PROJECTIONS)
    return frozen(gradients, loss, again=again)


def in_float32(name: str, samples: FrozenSamples, **changes) -> Evidence:
    return replace(low(name, samples, **changes), precision=Precision.FP32)


def judged(test: Evidence, control: Evidence | None = None, *, own: bool = True, **changes):
    control = control or in_float32("fsdp2", drawing(0))
    named = spec(test.name, own_random_numbers=own)
    measure = PrecisionRuns(control, control)
    return judge(test, control, spec=named, control_spec=spec(), measure=measure, **changes)


def outcome_of(found, name):
    return next(check.outcome for check in found.checks if check.name == name)


@pytest.mark.parametrize("seed", range(1, 21))
def test_a_set_that_draws_other_random_numbers_is_compared_in_the_mean(seed):
    found = judged(in_float32("tp2", drawing(seed)))
    assert outcomes(found) == ["PASS"] * 4
    assert {"loss-first-step", "gradients-envelope", "loss-envelope"} <= set(found.not_asked)
    assert outcome_of(found, "loss-equivalent") is Outcome.PASS
    assert found.judgement is Judgement.PASS, found.cause


def test_a_short_run_that_draws_is_inconclusive():
    """Single steps cannot show that it goes on learning the same, and few of them no mean."""

    def short(evidence: Evidence) -> Evidence:
        cut = {name: values[:4] for name, values in evidence.signals.items()}
        per_step = ("steps", "batch_digests", "batch_agrees")
        changes = {name: getattr(evidence, name)[:4] for name in per_step}
        samples = tuple(each for each in evidence.samples if each.step <= 4)
        kept = tuple(each for each in evidence.replicas if each.step <= 4)
        sampled = tuple(step for step in evidence.sample_steps if step <= 4)
        return replace(
            evidence,
            signals=cut,
            expected_steps=4,
            samples=samples,
            sample_steps=sampled,
            replicas=kept,
            **changes,
        )

    control = short(in_float32("fsdp2", drawing(0)))
    found = judged(short(in_float32("tp2", drawing(3))), control)
    assert found.judgement is Judgement.INCONCLUSIVE, found.cause
    assert outcome_of(found, "loss-equivalent") is Outcome.INCONCLUSIVE
    assert "too short" in found.cause


def test_a_bug_beside_random_numbers_is_seen_in_the_mean_and_named():
    samples = drawing(4)
    wrong = samples.sketch.copy()
    # One direction in all batches.
    wrong[:, 3] += 0.4 * samples.norm[:, 3, None] * PROJECTIONS[3, 0]
    found = judged(in_float32("tp2", replace(samples, sketch=wrong)))
    assert found.judgement is Judgement.FAIL
    assert outcome_of(found, "gradient-errors") is Outcome.FAIL
    assert NAMES[3] in found.cause
    assert found.cause_class is CauseClass.GRADIENT_DIRECTION


def test_a_bug_that_is_another_in_every_batch_is_seen_beside_random_numbers():
    samples = drawing(4)
    wrong = samples.sketch.copy()
    # The other way; gradients of these batches share no direction.
    twice = 2 * frozen(TRUTH).sketch[:, 3]
    wrong[:, 3] -= twice
    again = samples.again.copy()
    again[3] -= twice[0]
    found = judged(in_float32("tp2", replace(samples, sketch=wrong, again=again)))
    assert found.judgement is Judgement.FAIL
    assert NAMES[3] in found.cause


def test_a_factor_beside_random_numbers_is_seen():
    found = judged(in_float32("tp2", drawing(4, factor=1.05)))
    assert outcome_of(found, "gradient-scale") is Outcome.FAIL
    assert found.cause_class is CauseClass.GRADIENT_SCALE


def test_who_names_random_numbers_and_draws_none_is_invalid():
    plain = frozen(rounded(2), rounded_loss(2))
    found = judged(in_float32("tp2", replace(plain, again=plain.sketch[0])))
    assert found.judgement is Judgement.INVALID
    assert "named but not in force" in found.cause


def attack(**changes):
    samples = drawing(4)
    return judged(
        in_float32(
            "tp2",
            replace(
                samples,
                **{key: change(getattr(samples, key).copy()) for key, change in changes.items()},
            ),
        )
    )


def reversed_from_the_second(norms_or_sketches):
    norms_or_sketches[1:, 3] *= -1
    return norms_or_sketches


@pytest.mark.parametrize(
    "changes",
    [
        {"sketch": lambda sketch: -sketch},  # the second pass is right
        {"sketch": lambda sketch: -sketch, "again": lambda again: 1e6 * again},
        {"again": lambda again: np.where(np.arange(len(NAMES))[:, None] == 3, np.inf, again)},
        {"again": lambda again: np.where(np.arange(len(NAMES))[:, None] == 3, np.nan, again)},
        {"sketch": lambda sketch: np.roll(sketch, 1, axis=0)},  # the gradient of the batch before
        {"sketch": reversed_from_the_second},
    ],
)
def test_no_second_pass_widens_limits_as_it_likes(changes):
    found = attack(**changes)
    assert found.judgement in (Judgement.FAIL, Judgement.INVALID)


@pytest.mark.parametrize("size", [1e-3, 0.5 * DRAWN, 1.6 * DRAWN])
def test_who_draws_more_or_less_than_the_control_fails(size):
    """Another rate of dropout, or nearly none."""
    found = judged(in_float32("tp2", drawing(4, size)))
    assert outcome_of(found, "drawn-alike") is Outcome.FAIL
    assert "random numbers do not move gradients as in the control" in found.cause
    assert found.cause_class is CauseClass.OBJECTIVE


def test_noise_in_one_gradient_is_no_drawing():
    samples = drawing(4)
    noisy = samples.sketch + 0.0
    numbers = np.random.default_rng(9)
    add = lambda shape: 0.9 * samples.norm[0, 3] * numbers.standard_normal(shape) / 8  # noqa: E731
    noisy[:, 3] += add((BATCHES, 64))
    again = samples.again.copy()
    again[3] += add(64)
    found = judged(in_float32("tp2", replace(samples, sketch=noisy, again=again)))
    assert found.judgement in (Judgement.FAIL, Judgement.INVALID)


@pytest.mark.parametrize("factor", [1.1, 3.0])
def test_one_batch_that_is_scaled_is_seen_beside_random_numbers(factor):
    samples = drawing(4)
    scaled = np.where(np.arange(BATCHES) == 9, factor, 1.0)
    wrong = replace(
        samples,
        sketch=samples.sketch * scaled[:, None, None],
        norm=samples.norm * scaled[:, None],
    )
    assert outcome_of(judged(in_float32("tp2", wrong)), "gradient-scale") is Outcome.FAIL


def test_one_batch_of_another_loss_is_seen_beside_random_numbers():
    samples = drawing(4)
    wrong = replace(samples, loss=samples.loss * np.where(np.arange(BATCHES) == 9, 1.1, 1.0))
    assert outcome_of(judged(in_float32("tp2", wrong)), "frozen-loss") is Outcome.FAIL


@pytest.mark.parametrize(("size", "factor"), [(0.2, 0.9), (0.3, 0.9), (0.4, 0.9), (0.4, 1.1)])
def test_a_factor_is_seen_where_the_control_draws_nothing(size, factor):
    plain = frozen(TRUTH)
    control = in_float32("fsdp2", replace(plain, again=plain.sketch[0]))
    right = judged(in_float32("tp2", replace(drawing(4, size), loss=LOSS)), control)
    assert outcome_of(right, "gradient-scale") is Outcome.PASS
    wrong = judged(in_float32("tp2", replace(drawing(4, size, factor), loss=LOSS)), control)
    assert outcome_of(wrong, "gradient-scale") is Outcome.FAIL


def test_a_parameter_that_nothing_drawn_reaches_may_round():
    control, test = drawing(0), drawing(4)
    for samples in (control, test):
        samples.sketch[:, 3] = frozen(TRUTH).sketch[:, 3] * (1 + (1e-7 if samples is test else 0))
        samples.norm[:, 3] = frozen(TRUTH).norm[:, 3] * (1 + (1e-7 if samples is test else 0))
        samples.again[3] = samples.sketch[0, 3]
    found = judged(in_float32("tp2", test), in_float32("fsdp2", control))
    assert found.judgement is Judgement.PASS, found.cause


def test_random_numbers_without_a_second_pass_are_invalid():
    found = judged(in_float32("tp2", replace(drawing(2), again=None)))
    assert found.judgement is Judgement.INVALID
    assert "second pass" in found.cause


def test_random_numbers_with_nothing_to_measure_them_by_are_invalid():
    control = in_float32("fsdp2", drawing(0))
    named = spec("tp2", own_random_numbers=True)
    found = judge(in_float32("tp2", drawing(2)), control, spec=named, control_spec=spec())
    assert found.judgement is Judgement.INVALID
    assert "own_random_numbers" in found.cause


def test_random_numbers_that_the_control_does_not_draw_are_the_cause_where_nobody_names_them():
    plain = frozen(rounded(1), rounded_loss(1))
    control = low("fsdp2", replace(plain, again=plain.sketch[0]))
    reference = replace(
        REFERENCE, frozen=replace(REFERENCE.frozen, again=REFERENCE.frozen.sketch[0])
    )
    test = low("tp2", replace(drawing(5), loss=rounded_loss(5)))
    found = judge(
        test,
        control,
        spec=spec("tp2"),
        control_spec=spec(),
        measure=PrecisionRuns(control, reference),
    )
    assert found.judgement is Judgement.FAIL
    assert "its control draws none" in found.cause
    assert "own_random_numbers = true" in found.look_at


def test_other_random_numbers_of_the_same_degrees_are_a_fault():
    """All ranks draw one mask, say: whoever has the control's degrees draws what it draws."""
    reference = replace(REFERENCE, frozen=drawing(0))
    control = low("fsdp2", drawing(0))
    found = judge(
        low("other", drawing(6)),
        control,
        spec=spec("other"),
        control_spec=spec(),
        measure=PrecisionRuns(control, reference),
    )
    assert found.judgement is Judgement.FAIL
    assert "draws random numbers" not in found.cause


def test_a_gradient_that_is_not_finite_is_named_first():
    errors = Errors(
        names=("a", "b", "c"),
        frozen=True,
        test=np.array([0.1, np.nan, 0.01]),
        matched=np.full(3, 0.01),
        multiple=np.full(3, 3.0),
        scale=np.zeros((16, 3)),
        loss=np.zeros(16),
        loss_error=1e-3,
    )
    assert _worst(errors) == "b (no finite gradient), a (10 times the rounding)"
