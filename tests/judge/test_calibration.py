"""What repeats teach: how large rounding is, how it grows, how often a correct run exceeds it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judge_examples import SAMPLE_STEPS, SAMPLES, STEPS, in_force, run, samples, with_signals
from scipy import stats

from converge_harness.judge import calibrate
from converge_harness.judge.calibration import _spread, _typical
from converge_harness.judge.compare.envelopes import compare_signal
from converge_harness.judge.compare.limits import (
    IMPLEMENTATION_FACTOR,
    applicable,
    multiples,
    shares,
    tensor_multiple,
)
from converge_harness.model import Precision
from converge_harness.readers.run_folder.run import _unread as unread
from converge_harness.trainers.torchtitan import TORCHTITAN

CONTROL = run()


def repeat(name, difference):
    """A repeat whose loss differs relatively by a function of the step."""
    return with_signals(run(name), loss_recomputed=lambda step, x: x * (1 + difference(step)))


def test_the_scale_is_the_root_mean_square_of_the_repeats_and_never_falls():
    calibration = calibrate(
        CONTROL,
        [
            repeat("a", lambda step: 3e-8 if step == 1 else 0.0),
            repeat("b", lambda step: -4e-8 if step == 1 else 1e-9),
        ],
    )
    scale = calibration.signals["loss_recomputed"].scale
    assert scale[0] == pytest.approx(math.sqrt((9 + 16) / 2) * 1e-8, rel=1e-6)
    assert np.all(np.diff(scale) >= 0)
    assert calibration.signals["loss"].scale.tolist() == [0.0] * STEPS


def test_how_far_repeats_stay_apart_is_a_mean_and_a_level_at_the_end():
    """Of the second half; what drifts ends further off than it is on average."""
    half = STEPS // 2
    drifting = repeat("a", lambda step: 1e-8 * max(step - half, 0))
    steady = repeat("b", lambda step: -2e-8 if step > half else 1e-9)
    learnt = calibrate(CONTROL, [drifting, steady]).signals["loss_recomputed"]
    count = STEPS - half
    mean, end = 1e-8 * (count + 1) / 2, 1e-8 * count
    assert learnt.lasting == pytest.approx(math.sqrt((mean**2 + 4e-16) / 2), rel=1e-5)
    assert learnt.ending == pytest.approx(math.sqrt((end**2 + 4e-16) / 2), rel=1e-5)
    assert _typical([1e200, 1.0]) is None
    assert _typical([math.inf]) is None


def test_a_bit_identical_rerun_is_named_and_does_not_dilute_the_scale():
    loud = [repeat(name, lambda step: 1e-8) for name in "ab"]
    with_rerun = calibrate(CONTROL, [run("rerun"), *loud])
    without = calibrate(CONTROL, loud)
    assert (with_rerun.taught_by, without.taught_by) == (2, 2)
    assert with_rerun.repeats == ("rerun", "a", "b")
    scales = [c.signals["loss_recomputed"].scale for c in (with_rerun, without)]
    assert np.array_equal(*scales)


@pytest.mark.parametrize(
    ("law", "growth"), [(lambda step: 1e-8 * step**0.5, 0.5), (lambda step: 1e-8 * step, 1.0)]
)
def test_growth_is_the_exponent_of_the_power_law(law, growth):
    repeats = [repeat(str(sign), lambda step, s=sign: s * law(step)) for sign in (-1, 1)]
    learnt = calibrate(CONTROL, repeats).signals["loss_recomputed"]
    assert learnt.growth == pytest.approx(growth, abs=0.1)
    assert learnt.doubling_steps is None


def test_exponential_growth_is_measured_by_its_doubling_time():
    repeats = [
        repeat(str(sign), lambda step, s=sign: s * 1e-9 * 2 ** (step / 4)) for sign in (-1, 1)
    ]
    learnt = calibrate(CONTROL, repeats).signals["loss_recomputed"]
    assert learnt.doubling_steps == pytest.approx(4, rel=0.1)


def test_tensors_have_scales_of_their_own_at_every_sampled_step():
    def doubled(step, name, values):
        return values * (1 + 1e-6) if name == "norm.weight" else values

    other = replace(repeat("a", lambda step: 1e-9), samples=samples(gradient=doubled))
    tensors = calibrate(CONTROL, [other]).tensors
    assert tuple(tensors) == SAMPLE_STEPS
    assert tensors[0].gradient is None
    assert tensors[1].gradient == pytest.approx([0, 1e-6, 0], rel=0.3)  # 64 projections
    assert tensors[1].update == pytest.approx([0, 0, 0], abs=1e-12)
    assert tensors[1].names == SAMPLES[1].names


def loud_permutation():
    """Repeats of which the one that deals samples otherwise differs a thousand times more."""
    quiet = [repeat(f"ulp.{n}", lambda step: 1e-9) for n in range(3)]
    return [*quiet, replace(repeat("permute", lambda step: 1e-6), repeat="permute")]


def test_another_dealing_of_samples_excuses_only_test_sets_that_deal_otherwise():
    calibration = calibrate(CONTROL, loud_permutation())
    assert (calibration.taught_by, calibration.alike.taught_by) == (4, 3)
    accumulating = replace(CONTROL.in_force, local_batch_size=2, gradient_accumulation_steps=2)
    off = repeat("t", lambda step: 3e-7)
    alike = compare_signal("loss_recomputed", off, CONTROL, calibration)
    other = compare_signal(
        "loss_recomputed", replace(off, in_force=accumulating), CONTROL, calibration
    )
    assert alike.onset == 1
    assert other.onset is None


def test_what_makes_a_repeat_one_is_no_other_config():
    def configured(name, **config):
        ran = in_force(config={"training.seq_len": 256, **config})
        return run(name, in_force=ran, keys=TORCHTITAN.keys)

    control = configured("fsdp2", **{"dataloader.order_seed": None, "dump_folder": "/a"})
    permuted = configured("permute", **{"dataloader.order_seed": 2, "dump_folder": "/b"})
    assert not calibrate(control, [permuted]).problems
    other = configured("permute", **{"dataloader.order_seed": 2, "training.steps": 9})
    assert "training.steps differ" in calibrate(control, [other]).problems[0]


SAVING = {
    "checkpoint.enable": True,
    "checkpoint.load_only": False,
    "checkpoint.folder": "checkpoint",
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 0,
}
PLAIN = {
    "checkpoint.enable": True,
    "checkpoint.load_only": True,
    "checkpoint.folder": "checkpoint",
    "checkpoint.interval": 500,
    "checkpoint.keep_latest_k": 10,
}


@pytest.mark.parametrize(("ours", "theirs"), [(SAVING, PLAIN), (PLAIN, SAVING)])
def test_a_repeat_may_have_saved_where_it_waited_although_its_control_did_not(ours, theirs):
    def ran(name, config):
        return run(name, in_force=in_force(config=config), keys=TORCHTITAN.keys)

    control = ran("fsdp2", {**theirs, "checkpoint.initial_load_model_only": True})
    repeat = ran("ulp.2", {**ours, "checkpoint.initial_load_model_only": True})
    assert not calibrate(control, [repeat]).problems
    other = ran("ulp.2", {**ours, "checkpoint.initial_load_model_only": False})
    assert "initial_load_model_only differ" in calibrate(control, [other]).problems[0]


def test_without_a_record_of_what_ran_all_repeats_speak():
    calibration = calibrate(CONTROL, loud_permutation())
    assert applicable(calibration, replace(CONTROL, in_force=None), CONTROL) is calibration
    assert applicable(calibration, CONTROL, CONTROL) is calibration.alike
    assert calibrate(CONTROL, loud_permutation()[:3]).alike is None


def jittering(seed, size):
    """A repeat whose gradients differ by about ``size``, each tensor by its own luck."""
    draw = np.random.default_rng(seed)

    def jitter(step, name, values):
        return values * (1 + size * draw.standard_normal(values.shape))

    return replace(repeat(f"ulp.{seed}", lambda step: 1e-9), samples=samples(gradient=jitter))


def test_repeats_that_hardly_vary_make_a_tensor_s_limit_sharper_than_one_number_would_have():
    calibration = calibrate(CONTROL, [jittering(seed, 1e-6) for seed in range(5)])
    spread = calibration.tensors[1].gradient_spread
    assert 0 < spread < 0.6
    assert tensor_multiple(3, 1, 5, spread) < tensor_multiple(3, 1, 5)
    wild = calibrate(CONTROL, [jittering(seed, 10.0 ** -(9 - seed)) for seed in range(5)])
    assert wild.tensors[1].gradient_spread > 3 * spread
    assert tensor_multiple(3, 1, 5, 50.0) == tensor_multiple(3, 1, 5)
    assert tensor_multiple(3, 1, 5, math.inf) == tensor_multiple(3, 1, 5)


def test_one_repeat_tells_no_spread_and_a_quiet_tensor_counts_as_a_tenth_of_the_median():
    only = calibrate(CONTROL, [jittering(0, 1e-6)]).tensors[1]
    assert only.gradient_spread is None

    def but_one(step, name, values):
        return values if name == "norm.weight" else values * (1 + 1e-6)

    partly = replace(repeat("a", lambda step: 1e-9), samples=samples(gradient=but_one))
    quiet = calibrate(CONTROL, [partly]).tensors[1].gradient[1]
    assert quiet == pytest.approx(1e-7, rel=0.3)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda: replace(run("r"), complete=False), "the repeat r ended early"),
        (lambda: with_signals(run("r"), loss=lambda *_: math.nan), "loss is nan"),
        (lambda: with_signals(run("r"), loss=lambda step, x: x if step > 3 else None), "no loss"),
        (lambda: replace(run("r"), identity="a" * 64), "its job.json says that it is not one"),
        (
            lambda: unread(
                "metrics.jsonl is not what it was", name="r", source="r", identity="a" * 64
            ),
            "the repeat r left no step at all: metrics.jsonl is not what it was",
        ),
        (lambda: run("r", in_force=in_force(config={"seed": 2})), "r is not a repeat of fsdp2: "),
        (lambda: replace(run("r"), batch_digests=("0" * 16,) * STEPS), "other samples"),
        (lambda: with_signals(run("r"), loss=lambda _, x: 1.1 * x), "fails reported-loss"),
        (lambda: replace(repeat("r", lambda _: 0.1), rounding={}), "fails reported-loss"),
    ],
)
def test_a_repeat_that_teaches_nothing_sound_is_a_problem(broken, words):
    calibration = calibrate(CONTROL, [broken()])
    assert words in calibration.problems[0]


# ----------------------------------------------------------------------- chance


def test_the_shares_of_a_budget_never_add_up_to_more_than_it():
    total = np.cumsum(shares(2**16))
    assert np.all(np.diff(shares(2**16)) <= 0)
    assert 0.9 < total[-1] < 1


def test_a_limit_is_the_quantile_of_its_share():
    limit = multiples(np.arange(1, 9), alarms=1e-3, repeats=5)
    expected = [stats.t.isf(1e-3 * share / 2, 5) for share in shares(8)]
    assert limit == pytest.approx(np.array(expected) * IMPLEMENTATION_FACTOR)


def test_more_repeats_tighten_limits_and_more_tensors_widen_them():
    looks = np.arange(1, 100)
    assert np.all(multiples(looks, 1e-4, 20) < multiples(looks, 1e-4, 5))
    assert tensor_multiple(1000, 1, 5) > tensor_multiple(10, 1, 5)
    assert tensor_multiple(10, 6, 5) > tensor_multiple(10, 1, 5)


def test_a_run_longer_than_its_calibration_is_judged_by_the_law_that_fits():
    repeats = [repeat(str(sign), lambda step, s=sign: s * 1e-7 * step) for sign in (-1, 1, 1)]
    calibration = calibrate(CONTROL, repeats)
    longer = {name: np.resize(column.values, 4 * STEPS) for name, column in CONTROL.signals.items()}
    control = replace(CONTROL, steps=np.arange(1, 4 * STEPS + 1), signals=longer)
    limit = compare_signal("loss_recomputed", control, control, calibration).limit
    assert limit[-1] > 3 * limit[STEPS - 1]


def test_a_calibration_of_another_regime_does_not_sharpen_a_coarser_set():
    calibration = calibrate(CONTROL, [repeat(str(n), lambda step: 1e-9) for n in range(5)])
    coarse = replace(run("t"), precision=Precision.BF16)
    alike, across = (
        compare_signal("loss", test, CONTROL, calibration) for test in (run("t"), coarse)
    )
    assert across.limit[0] > 100 * alike.limit[0]
    assert "bf16" in across.floor_origin


def test_a_tensor_that_only_some_repeats_moved_teaches_no_spread():
    finite = [np.array([1e-3, 2e-3]), np.array([2e-3, 1e-3])]
    still = [np.append(each, value) for each, value in zip(finite, (np.inf, 0.0), strict=True)]
    assert _spread(still) == _spread(finite) > 0
