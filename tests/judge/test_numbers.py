"""First step and envelope: what rounding explains passes, what bugs do does not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judge_examples import LOSSES, NORMS, STEPS, foreign, judge, run, spec, with_signals

from converge_harness.judge import calibrate, compare_runs
from converge_harness.judge.compare.curves import relative_difference
from converge_harness.judge.compare.envelopes import compare_signal
from converge_harness.judge.compare.floors import FLOORS, coarser
from converge_harness.judge.compare.reported import agreement
from converge_harness.model import JUDGED_SIGNALS, InForce, Judgement, Outcome, Precision

CONTROL = run()
SPEC = spec()


def judged(test, repeats=(), **more):
    calibration = calibrate(CONTROL, repeats) if repeats else None
    return judge(test, CONTROL, calibration, spec=SPEC, control_spec=SPEC, **more)


def answer(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


def scaled(factor, *signals, start=1, stop=STEPS, name="t"):
    def change(step, value):
        return value * factor if start <= step <= stop else value

    return with_signals(run(name), **dict.fromkeys(signals, change))


# -------------------------------------------------------------- differences


def test_relative_difference_is_symmetric_and_fails_closed():
    first = np.array([2.0, 0.0, 0.0, np.nan, np.inf, 1e308, -1.0, 5e-324])
    second = np.array([1.0, 0.0, 1.0, np.nan, np.inf, -1e308, 1.0, 1e300])
    there, back = relative_difference(first, second), relative_difference(second, first)
    assert np.array_equal(there, back)
    assert there.tolist() == [1.0, 0.0, math.inf, math.inf, math.inf, math.inf, 2.0, math.inf]


@pytest.mark.parametrize("precision", Precision)
def test_floors_never_shrink_with_steps_and_recomputed_ones_are_no_wider_at_first(precision):
    steps = np.arange(1, 3001)
    for signal in JUDGED_SIGNALS:
        floor = FLOORS[precision][signal].at(steps)
        assert np.all(np.diff(floor) >= 0)
        assert floor[0] > 0
    table = FLOORS[precision]
    assert table["loss_recomputed"].first <= table["loss"].first
    assert table["grad_norm_recomputed"].first <= table["grad_norm"].first


def test_the_coarser_precision_sets_the_floor():
    assert coarser(Precision.FP32, Precision.FLOAT8) is Precision.FLOAT8
    assert coarser(Precision.BF16, Precision.FP32) is Precision.BF16
    test = replace(scaled(1 + 5e-4, "loss", "loss_recomputed"), precision=Precision.FLOAT8)
    assert judged(test).judgement is Judgement.PASS
    assert judged(replace(test, precision=Precision.FP32)).judgement is Judgement.FAIL
    assert "float8" in answer(judged(test), "loss-envelope").limit.origin


# ------------------------------------------------------- measured facts pass

MEASURED_RIGHT = {
    "TP 2 in fp32": (Precision.FP32, {"loss": 1.2e-7, "grad_norm": 2.6e-5}),
    "DDP 2 in fp32": (Precision.FP32, {"loss": 1.2e-7, "grad_norm": -8.2e-5}),
    "bf16 against fp32": (Precision.BF16, {"loss": 2.2e-4, "grad_norm": 1.4e-3}),
    "Float8 emulated": (Precision.FLOAT8, {"loss": 4.2e-4, "grad_norm": 1.1e-3}),
    "Float8 x TP 2 rowwise": (Precision.FLOAT8, {"loss": 5.1e-4, "grad_norm": 2.8e-3}),
}


@pytest.mark.parametrize("case", MEASURED_RIGHT)
def test_differences_measured_between_right_runs_pass(case):
    precision, differences = MEASURED_RIGHT[case]
    test = replace(CONTROL, precision=precision)
    for signal, difference in differences.items():
        test = with_signals(test, **{signal: lambda step, x, d=difference: x * (1 + d)})
        if precision is not Precision.FP32:  # in fp32 the recomputed values agree to 5e-9
            recomputed = f"{signal}_recomputed"
            test = with_signals(test, **{recomputed: lambda step, x, d=difference: x * (1 + d)})
    assert judged(test).judgement is Judgement.PASS


MEASURED_WRONG = {
    "2972": (Precision.FP32, {"grad_norm": 868 / 0.86 - 1}),
    "2318": (Precision.FP32, {"grad_norm": -0.5}),
    "A": (Precision.FP32, {"loss": 4.8e-4, "grad_norm": 1.9e-3}),
    "A, loss alone": (Precision.FP32, {"loss": 4.8e-4}),
    "A, grad norm alone": (Precision.FP32, {"grad_norm": 1.9e-3}),
    "B": (Precision.FLOAT8, {"loss": 1.5e-2, "grad_norm": 2e-2}),
    "F": (Precision.FP32, {"loss": 1.0}),
    "+4.9% everywhere": (Precision.FLOAT8, {"loss": 4.9e-2}),
    "+2.9% everywhere": (Precision.FLOAT8, {"loss": 2.9e-2}),
}


@pytest.mark.parametrize("case", MEASURED_WRONG)
def test_differences_measured_on_real_bugs_fail(case):
    precision, differences = MEASURED_WRONG[case]
    test = replace(CONTROL, precision=precision)
    for signal, difference in differences.items():
        test = with_signals(test, **{signal: lambda step, x, d=difference: x * (1 + d)})
    verdict = judged(test)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.onset_step == 1


# ---------------------------------------------------------------- envelopes


def test_one_step_times_a_hundred_fails_and_its_step_is_the_onset():
    verdict = judged(scaled(100, "loss", start=11, stop=11))
    check = answer(verdict, "loss-envelope")
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, 11)
    assert check.onset == 11
    assert check.steps == (1, 20)
    assert check.measured == pytest.approx(99)
    assert check.limit.value == pytest.approx(2e-6 * math.sqrt(11))
    assert "1 of 20 steps outside" in check.detail


@pytest.mark.parametrize("signal", JUDGED_SIGNALS)
def test_each_signal_has_a_first_step_and_an_envelope_of_its_own(signal):
    slug = signal.replace("_", "-")
    first = judged(scaled(1.5, signal))
    assert answer(first, f"{slug}-first-step").outcome is Outcome.FAIL
    assert answer(first, f"{slug}-envelope").outcome is Outcome.FAIL
    later = judged(scaled(1.5, signal, start=5))
    assert answer(later, f"{slug}-first-step").outcome is Outcome.PASS
    check = answer(later, f"{slug}-envelope")
    assert (check.outcome, check.onset) == (Outcome.FAIL, 5)


def noisy(name, size, start=1):
    """A repeat whose loss differs by ``size``; its sign changes by step, and by repeat."""

    def change(step, value):
        return value * (1 + size * (-1) ** (step + ord(name[-1]))) if step >= start else value

    return with_signals(run(name), loss=change, loss_recomputed=change)


def test_repeats_widen_the_envelope_from_their_step_on():
    test = scaled(1 + 2e-4, "loss", "loss_recomputed", start=10)
    assert judged(test).judgement is Judgement.FAIL
    repeats = (run("rerun"), *(noisy(f"ulp.{n}", 1e-4, start=10) for n in range(3)))
    verdict = judged(test, repeats=repeats)
    assert verdict.judgement is Judgement.PASS
    limit = answer(verdict, "loss-envelope").limit
    assert 2e-4 < limit.value <= 3e-2
    assert "spread of 3 repeats" in limit.origin
    early = scaled(1 + 2e-4, "loss", "loss_recomputed", start=4)
    assert judged(early, repeats=repeats).onset_step == 4


def test_limits_learnt_from_quiet_repeats_are_sharper_than_the_floor_without():
    repeats = tuple(noisy(f"ulp.{n}", 1e-9) for n in range(5))
    test = scaled(1 + 4e-7, "loss_recomputed")
    assert judged(test).judgement is Judgement.PASS
    verdict = judged(test, repeats=repeats)
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, 1)


def test_no_spread_of_repeats_excuses_more_than_the_ceiling():
    repeats = tuple(noisy(f"ulp.{n}", 8e-3) for n in range(2))
    test = scaled(1.031, "loss", "loss_recomputed")
    assert judged(test, repeats=repeats).judgement is Judgement.FAIL


def noisy_norms(name, size):
    numbers = np.random.default_rng(list(name.encode()))
    noise = dict(enumerate(size * numbers.standard_normal(STEPS), 1))
    return with_signals(
        noisy(name, 1e-7),
        **dict.fromkeys(
            ("grad_norm", "grad_norm_recomputed"),
            lambda step, value: value * (1 + (noise[step] if step > 2 else 0)),
        ),
    )


@pytest.mark.parametrize(
    ("size", "factor", "outcome"),
    [
        (1e-3, 1.35, Outcome.FAIL),  # repeats agree, so no norm is a third off
        (6e-2, 1.35, Outcome.PASS),  # one correct run in 100 would be above the ceiling of 30%
        (6e-2, 5.0, Outcome.FAIL),  # further than what repeats allow
        (6e-2, math.nan, Outcome.FAIL),
    ],
)
def test_the_ceiling_of_norms_gives_way_where_right_runs_are_above_it(size, factor, outcome):
    repeats = tuple(noisy_norms(f"ulp.{n}", size) for n in range(5))
    test = scaled(factor, "grad_norm", "grad_norm_recomputed", start=14, stop=14)
    assert answer(judged(test, repeats=repeats), "grad-norm-envelope").outcome is outcome


def test_the_ceiling_of_norms_holds_at_the_first_steps():
    repeats = tuple(noisy_norms(f"ulp.{n}", 6e-2) for n in range(5))
    test = scaled(1.35, "grad_norm", "grad_norm_recomputed", stop=1)
    assert answer(judged(test, repeats=repeats), "grad-norm-first-step").outcome is Outcome.FAIL


def spiked(name, factor, at):
    run = noisy(name, 1e-7)
    return with_signals(
        run,
        **dict.fromkeys(
            ("grad_norm", "grad_norm_recomputed"),
            lambda step, value: value * (factor if step == at else 1),
        ),
    )


@pytest.mark.parametrize(
    ("spikes", "at", "judgement"),
    [
        ({0: 10, 1: 12}, 14, Judgement.PASS),
        ({0: 10, 1: 12}, 5, Judgement.FAIL),  # before the norm of any repeat leapt
        ({0: 10}, 14, Judgement.INVALID),  # one repeat may be broken
        ({0: 2, 1: 2}, 14, Judgement.INVALID),  # at the first steps correct runs agree
        ({}, 14, Judgement.FAIL),
    ],
)
def test_a_norm_is_not_judged_where_those_of_several_repeats_leap(spikes, at, judgement):
    repeats = tuple(
        spiked(f"ulp.{n}", 3.0, spikes[n]) if n in spikes else noisy(f"ulp.{n}", 1e-7)
        for n in range(5)
    )
    verdict = judged(spiked("test", 2.5, at), repeats=repeats)
    if judgement is Judgement.INVALID:
        assert "the repeat ulp.0 is out of line" in answer(verdict, "repeats-sound").detail
    else:
        assert verdict.judgement is judgement
    if judgement is Judgement.PASS:
        assert "inside at the first 7 steps" in answer(verdict, "grad-norm-envelope").detail


# --------------------------------------------------------------- tolerances


def test_a_tolerance_of_the_file_replaces_the_limit_and_says_so():
    test = scaled(1 + 9e-3, "loss", "loss_recomputed")
    verdict = judged(test, tolerances={"loss": 1e-2}, margin=1e-2)
    check = answer(verdict, "loss-recomputed-envelope")
    assert verdict.judgement is Judgement.PASS
    assert str(check.limit) == "0.01 (set in the file)"
    # The spec's own tolerances count when none are given.
    allowing = replace(SPEC, tolerances={"loss": 1e-2}, margin=1e-2)
    assert judge(test, CONTROL, spec=allowing, control_spec=SPEC).judgement is Judgement.PASS
    # It is a limit of single steps: what lasts is judged by the margin.
    lasting = judged(test, tolerances={"loss": 1e-2})
    assert answer(lasting, "loss-envelope").outcome is Outcome.PASS
    assert answer(lasting, "loss-equivalent").outcome is Outcome.FAIL
    own = {"loss": 1e-2, "loss_recomputed": 1e-6}
    assert judged(test, tolerances=own).judgement is Judgement.FAIL


def test_a_tolerance_of_zero_wants_the_same_bits():
    exact = {"loss": 0.0, "grad_norm": 0.0}
    assert judged(run("t"), tolerances=exact).judgement is Judgement.PASS
    off = with_signals(run("t"), loss=lambda step, x: math.nextafter(x, 9) if step == 4 else x)
    verdict = judged(off, tolerances=exact)
    assert (verdict.judgement, verdict.onset_step) == (Judgement.FAIL, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-3])
def test_a_tolerance_that_would_pass_anything_is_refused(value):
    with pytest.raises(ValueError, match="tolerance of loss is"):
        judged(run("t"), tolerances={"loss": value})


# ------------------------------------------------------------------ details


def test_a_rounded_log_is_judged_as_far_as_it_prints():
    control = foreign("a", loss=LOSSES, grad_norm=tuple(x / 99 for x in NORMS))
    printed = with_signals(
        control, loss=lambda step, x: round(x, 5), grad_norm=lambda step, x: round(x, 4)
    )
    assert judge(printed, control).judgement is Judgement.INCONCLUSIVE
    printed = replace(printed, rounding={"loss": 5e-6, "grad_norm": 5e-5})
    verdict = judge(printed, control)
    assert verdict.judgement is Judgement.PASS
    assert "rounding of the log" in answer(verdict, "grad-norm-envelope").limit.origin
    off = with_signals(printed, grad_norm=lambda step, x: x * 1.05)
    assert judge(off, control).judgement is Judgement.INCONCLUSIVE
    wrong = with_signals(printed, grad_norm=lambda step, x: x * 2)
    assert judge(wrong, control).judgement is Judgement.FAIL


def test_below_its_rounding_a_log_says_nothing():
    control = foreign("a", loss=LOSSES, grad_norm=(1e-6,) * STEPS)
    printed = replace(
        with_signals(control, grad_norm=lambda step, x: 0.0), rounding={"grad_norm": 5e-5}
    )
    verdict = judge(printed, control)
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert verdict.cause == (
        f"the grad norm prints as 0 at {STEPS} of {STEPS} steps, because it is smaller than the "
        "last printed digit: log more digits"
    )
    larger = with_signals(control, grad_norm=lambda step, x: 1.0)
    verdict = judge(printed, larger)
    assert verdict.judgement is Judgement.FAIL
    assert "the grad norm is off by a factor of 0" in verdict.cause
    assert (
        "curves do not show whether gradients are, or only what was logged of them" in verdict.cause
    )


def test_a_value_that_falls_below_the_last_digit_is_equal_as_printed():
    norms = tuple(2 * math.exp(-step) for step in range(1, STEPS + 1))
    control = foreign("a", loss=LOSSES, grad_norm=norms)
    printed = with_signals(control, grad_norm=lambda step, x: round(x, 6))
    printed = replace(printed, rounding={"grad_norm": 5e-7})
    assert printed.signals["grad_norm"].values[-1] == 0
    assert judge(printed, control).judgement is Judgement.PASS
    risen = with_signals(printed, grad_norm=lambda step, x: x + 1e-4 * (step == STEPS))
    assert judge(risen, control).judgement is not Judgement.PASS


def test_a_grad_norm_that_starts_late_is_not_a_first_step():
    late = (None, *NORMS[1:])
    test = foreign("b", loss=LOSSES, grad_norm=late)
    verdict = judge(test, foreign("a", loss=LOSSES, grad_norm=NORMS))
    assert answer(verdict, "grad-norm-first-step").outcome is Outcome.INVALID
    assert verdict.judgement is Judgement.INVALID


def test_gradients_that_are_missing_fail_by_name_unless_the_control_misses_them_too():
    test = replace(
        with_signals(run("t"), grads_missing=lambda step, x: 1.0),
        grads_missing=("tok_embeddings.weight",),
    )
    check = answer(judged(test), "gradients-present")
    assert (check.outcome, check.onset, check.measured) == (Outcome.FAIL, 1, 1.0)
    assert check.detail == "no gradient for tok_embeddings.weight at step 1"
    frozen = replace(CONTROL, signals=test.signals, grads_missing=test.grads_missing)
    assert answer(judge(test, frozen), "gradients-present").outcome is Outcome.PASS
    other = replace(frozen, grads_missing=("norm.weight",))
    check = answer(judge(test, other), "gradients-present")
    assert (check.outcome, check.onset) == (Outcome.FAIL, None)
    counted = replace(test, grads_missing=())
    assert "no gradient for 1 parameters" in answer(judged(counted), "gradients-present").detail


EXPERT = "layers.3.mlp.experts.1.linear_fc2.weight"


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        (EXPERT, {4}, Outcome.PASS),
        (EXPERT, {2, 9}, Outcome.PASS),
        (EXPERT, {1, 4}, Outcome.FAIL),
        (EXPERT, {*range(2, STEPS + 1)}, Outcome.FAIL),  # it is lost after the first step
        (EXPERT, {*range(STEPS // 2, STEPS + 1)}, Outcome.FAIL),
        ("layers.3.mlp.router.weight", {4}, Outcome.FAIL),
        ("layers.3.mlp.linear_fc2.weight", {4}, Outcome.FAIL),
        ("layers.3.moe.experts.w1", {4}, Outcome.FAIL),  # of all experts
    ],
)
def test_an_expert_may_get_no_tokens_now_and_then_after_the_first_step(name, steps, expected):
    def lacking(*names):
        counts = with_signals(run("t"), grads_missing=lambda at, x: len(names) * float(at in steps))
        at = frozenset((step, each) for step in steps for each in names)
        return replace(counts, grads_missing=names, grads_missing_at=at)

    check = answer(judged(lacking(name)), "gradients-present")
    assert check.outcome is expected
    assert expected is Outcome.PASS or name in check.detail
    # A second one without a gradient is not explained by the expert.
    check = answer(judged(lacking(name, "norm.weight")), "gradients-present")
    assert check.outcome is Outcome.FAIL
    assert "norm.weight" in check.detail
    # Where nothing says at which steps, nothing is excused.
    unknown = replace(lacking(name), grads_missing_at=frozenset())
    assert answer(judged(unknown), "gradients-present").outcome is Outcome.FAIL


@pytest.mark.parametrize(
    "forget", [None, lambda step, x: None if step == 7 else x], ids=["every step", "one step"]
)
def test_a_run_of_ours_that_does_not_tell_of_its_gradients_is_invalid(forget):
    silent = with_signals(run("t"), grads_missing=forget)
    silent_control = with_signals(CONTROL, grads_missing=forget)
    for test, control in ((silent, CONTROL), (run("t"), silent_control)):
        verdict = judge(test, control, spec=spec(), control_spec=spec())
        assert answer(verdict, "gradients-present").outcome is Outcome.INVALID
        assert verdict.judgement is Judgement.INVALID
        assert judge(test, control).judgement is Judgement.PASS


@pytest.mark.parametrize("signal", ["loss", "grad_norm"])
def test_a_reported_value_that_is_not_the_recomputed_one_fails(signal):
    slug = f"reported-{signal.replace('_', '-')}-is-recomputed"
    assert answer(judged(run("t")), slug).outcome is Outcome.PASS
    check = answer(judged(scaled(1.01, signal, start=8)), slug)
    assert (check.outcome, check.onset) == (Outcome.FAIL, 8)


def test_limits_are_one_per_common_step_for_drawing():
    test = with_signals(run("t"), loss=lambda step, x: None if step == 3 else x, grad_norm=None)
    drawn = compare_runs(test, CONTROL).limits
    assert set(drawn) == {"loss", "loss_recomputed", "grad_norm_recomputed"}
    assert len(drawn["loss"]) == STEPS
    assert math.isnan(drawn["loss"][2])
    envelope = compare_signal("loss", test, CONTROL)
    assert [x for x in drawn["loss"] if not math.isnan(x)] == envelope.limit.tolist()


# ------------------------------------------------------------------ metrics


@pytest.mark.parametrize(
    ("stored", "outside"),
    [("float32", True), ("bfloat16", False), ("bfloat16+float32", False), (None, False)],
)
def test_a_reported_norm_is_as_near_as_what_parameters_are_stored_in_allows(stored, outside):
    """In bf16 mixed gradients are float32, and so is the norm that clips them."""
    said = with_signals(CONTROL, grad_norm=lambda _, value: value * 1.01)
    low = replace(said, precision=Precision.BF16, in_force=InForce(param_dtype=stored))
    assert bool(agreement(low, "grad_norm").outside.size) is outside
    said = with_signals(low, loss=lambda _, value: value * (1 + 5e-5))
    assert agreement(said, "loss").outside.size  # a float32 mean in every regime
