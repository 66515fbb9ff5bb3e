"""Two curves, and nothing says what correct runs do: benign pairs are not blamed, gross ones are.

The noise is like that of torchtitan's published curves of Llama 3 on CUDA and ROCm: 1e-4 at step 1,
and from step 25 on much more, from step to step: 1% there, here 0.4%, so that limits may be learnt.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from judge_examples import judge

from converge_harness.judge import calibrate
from converge_harness.model import CauseClass, Evidence, Judgement, ReplayConflict

STEPS = 100
AT = np.arange(1, STEPS + 1)
LOSS = 2.5 + 5.5 * np.exp(-AT / 12)
NORM = 1.0 + 0.5 * np.exp(-AT / 30)
GRADIENTS = ("backward", "gradient direction", "objective differs", "reduced", "optimizer")


def noise(seed):
    grown = np.where(AT < 25, 1e-4 * np.sqrt(AT), 4e-3)
    return grown * np.random.default_rng(seed).standard_normal(STEPS)


def curve(name="test", seed=None, loss=1.0, norm=1.0):
    """A run: the noise of other hardware by its seed, and what is wrong as factors."""
    off = 0.0 if seed is None else noise(seed)
    signals = {"loss": LOSS * loss * (1 + off), "grad_norm": NORM * norm * (1 + 3 * off)}
    return Evidence(name, f"{name}.csv", AT, signals)


CONTROL = curve("control")


@pytest.mark.parametrize("seed", range(5))
def test_right_runs_of_other_hardware_are_not_blamed(seed):
    verdict = judge(curve(seed=seed), CONTROL)
    assert verdict.judgement is Judgement.INCONCLUSIVE
    assert "no repeat of the control shows how much correct runs differ" in verdict.cause
    assert all(word in verdict.cause for word in ("3 or more runs", "--margin", "--tolerance"))
    assert not any(word in verdict.cause for word in GRADIENTS)


@pytest.mark.parametrize("seed", range(5))
def test_with_repeats_right_runs_pass_and_wrong_ones_fail(seed):
    repeats = [curve(f"r{each}", seed=100 + each) for each in range(5)]
    calibration = calibrate(CONTROL, repeats)
    assert not calibration.problems
    right = judge(curve(seed=seed), CONTROL, calibration, margin=5e-3)
    assert right.judgement is Judgement.PASS, right.cause
    wrong = judge(curve(seed=seed, loss=1.05), CONTROL, calibration, margin=5e-3)
    assert wrong.judgement is Judgement.FAIL
    assert not any(word in wrong.cause for word in GRADIENTS)


@pytest.mark.parametrize("made", [1, 2])
def test_a_few_repeats_that_differ_neither_pass_nor_fail_a_curve(made):
    """Limits from so few would let a step pass that is 2.5% off, 200 times as far as they are."""
    random = np.random.default_rng(0)
    right, *repeats = (
        curve(name, loss=1 + noise, norm=1 + noise)
        for name in ("test", "r1", "r2", "r3")
        for noise in [1.25e-4 * random.standard_normal(STEPS)]
    )
    for test in (right, curve(loss=np.where(AT == 60, 1.025, 1.0))):
        few = judge(test, CONTROL, calibrate(CONTROL, repeats[:made]))
        assert few.judgement is Judgement.INCONCLUSIVE
        that = "1 repeat that differs" if made == 1 else "2 repeats that differ"
        assert f"{that} from the control cannot show how much correct runs differ" in few.cause
        assert few.next_command.count("--repeat RUN_") == 3 - made
        of_a_file = replace(calibrate(CONTROL, repeats[:made]), sources=())
        assert judge(test, CONTROL, of_a_file).next_command.count("--repeat RUN_") == 3
        assert judge(test, CONTROL).judgement is few.judgement
        enough = judge(test, CONTROL, calibrate(CONTROL, repeats), margin=0.02)
        assert enough.judgement is Judgement.PASS
    calibration = calibrate(CONTROL, repeats[:made])
    assert judge(curve(), CONTROL, calibration).judgement is Judgement.PASS
    assert judge(curve(loss=1.2), CONTROL, calibration).judgement is Judgement.FAIL


@pytest.mark.parametrize("seed", range(5))
def test_a_mean_grad_norm_that_repeats_do_not_explain_fails_though_no_step_does(seed):
    """As of a learning rate that is 1% off in bf16: single steps are inside their wide limits."""
    random = np.random.default_rng(seed)
    right, *repeats = (
        curve(name, loss=1 + noise, norm=1 + noise)
        for name in ("test", "r1", "r2", "r3")
        for noise in [1.25e-4 * random.standard_normal(STEPS)]
    )
    low = replace(
        right,
        signals={**right.signals, "grad_norm": NORM * np.where(AT > 20, 0.998, 1.0)},
    )
    learnt = calibrate(CONTROL, repeats)
    assert judge(right, CONTROL, learnt).judgement is Judgement.PASS
    verdict = judge(low, CONTROL, learnt)
    assert verdict.judgement is Judgement.FAIL
    assert "the mean grad norm is off by -0.002 ± " in verdict.cause
    assert "over steps 51 to 100, and means of 3 repeats by " in verdict.cause
    assert verdict.cause_class is CauseClass.UNKNOWN
    # Noise of single steps moves a mean as well.
    shaken = 1e-2 * np.random.default_rng(90 + seed).standard_normal(STEPS)
    noisy = 1 + np.where(AT > 20, shaken, 0.0)
    loud = replace(right, signals={**right.signals, "grad_norm": NORM * noisy})
    assert judge(loud, CONTROL, learnt).judgement is Judgement.PASS
    # Two repeats know no mean, noisier or shorter ones do not show it, a tolerance is about steps.
    assert judge(low, CONTROL, calibrate(CONTROL, repeats[:2])).judgement is Judgement.INCONCLUSIVE
    apart = [
        replace(each, signals={**each.signals, "grad_norm": NORM * (1 + off)})
        for each, off in zip(repeats, (2e-3, -2e-3, 3e-3), strict=True)
    ]
    assert judge(low, CONTROL, calibrate(CONTROL, apart)).judgement is Judgement.PASS
    short = [each.up_to(STEPS - 1) for each in repeats]
    known = calibrate(CONTROL.up_to(STEPS - 1), short)
    assert judge(low, CONTROL, known).judgement is Judgement.PASS
    tolerated = judge(low, CONTROL, learnt, tolerances={"grad_norm": 5e-3})
    assert tolerated.judgement is Judgement.PASS


def test_a_mean_grad_norm_leaves_out_what_was_printed_as_hardly_a_digit():
    """0.0001 and 0.0002 may be the same number; a third of the run prints so."""
    norms = np.where(AT > 70, 1.5e-4, NORM)

    def printed(name, seed, last):
        off = 1 + 1e-5 * np.random.default_rng(seed).standard_normal(STEPS)
        signals = {
            "loss": LOSS * off,
            "grad_norm": np.where(AT > 70, last, np.round(norms * off, 4)),
        }
        return Evidence(name, f"{name}.csv", AT, signals, rounding={"grad_norm": 5e-5})

    control, *repeats = (printed(f"r{seed}", seed, 1e-4) for seed in range(4))
    learnt = calibrate(control, repeats)
    assert (learnt.taught_by, learnt.problems) == (3, ())
    right = judge(printed("test", 9, 2e-4), control, learnt)
    assert right.judgement is Judgement.PASS, right.cause
    wrong = judge(printed("test", 9, 3e-4), control, learnt)
    assert wrong.judgement is Judgement.FAIL


def test_reruns_that_are_the_same_to_the_last_bit_say_what_noise_is():
    """A program without the probe leaves such reruns: then the fixed floors are its limits."""
    calibration = calibrate(CONTROL, [curve("rerun")])
    assert judge(curve(), CONTROL, calibration).judgement is Judgement.PASS
    verdict = judge(curve(loss=1.01), CONTROL, calibration)
    assert verdict.judgement is Judgement.FAIL
    assert not any(word in verdict.cause for word in GRADIENTS)


def another_seed(name, seed):
    """A run of the same thing from other initial weights, on other samples: 5% apart."""
    off = 5e-2 * np.random.default_rng(seed).standard_normal(STEPS)
    return Evidence(name, f"{name}.csv", AT, {"loss": LOSS * (1 + off), "grad_norm": NORM})


@pytest.mark.parametrize("seed", range(10))
def test_repeats_that_are_far_apart_judge_nothing(seed):
    calibration = calibrate(CONTROL, [another_seed(f"r{at}", 50 + seed + at) for at in range(3)])
    for test in (another_seed("test", seed), curve(seed=seed), curve(loss=1.2)):
        verdict = judge(test, CONTROL, calibration)
        assert verdict.judgement is Judgement.INVALID
        assert "the control does not reproduce itself" in verdict.cause
    nan = curve(loss=np.where(AT > 50, math.nan, 1.0))
    assert judge(nan, CONTROL, calibration).judgement is Judgement.FAIL


GROSS = {
    "a fifth more": (curve(loss=1.2), None),
    "drifts off": (curve(loss=1 + 0.3 * AT / STEPS), None),
    "one step x100": (curve(loss=np.where(AT == 30, 100.0, 1.0)), 30),
    "learns nothing": (curve(loss=LOSS[0] / LOSS), 16),
    "norm doubled": (curve(norm=2.0), None),
    "norm halved": (curve(norm=0.5), None),
    "one norm x20": (curve(norm=np.where(AT == 7, 20.0, 1.0)), 7),
}


@pytest.mark.parametrize("margin", [None, 0.01])
@pytest.mark.parametrize("case", GROSS)
def test_a_gross_difference_fails_by_a_stated_rule(case, margin):
    test, onset = GROSS[case]
    verdict = judge(test, CONTROL, margin=margin)
    assert verdict.judgement is Judgement.FAIL
    assert onset is None or verdict.onset_step == onset
    failed = [each for each in verdict.checks if each.outcome.value == "FAIL" and each.limit]
    assert margin or any("gross" in each.limit.origin for each in failed)
    assert not any(word in verdict.cause for word in GRADIENTS)
    there, back = judge(test, CONTROL), judge(CONTROL, test)
    assert there.judgement is back.judgement


def test_steps_that_a_log_has_twice_are_not_blamed_on_a_checkpoint():
    conflicts = {"replayed": (9,), "replay_conflicts": (ReplayConflict(9, "loss 6.8, then 6.9"),)}
    assert judge(replace(curve(), **conflicts), CONTROL).judgement is Judgement.INVALID
    off = replace(curve(loss=np.where(AT >= 9, 1.5, 1.0)), **conflicts)
    verdict = judge(off, CONTROL)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause.startswith(
        "steps were logged twice with different values, step 9: loss 6.8"
    )
    assert "which look the same in curves" in verdict.cause
    assert verdict.cause_class is CauseClass.UNKNOWN


def test_a_norm_off_by_one_factor_is_not_blamed_on_gradients():
    verdict = judge(curve(norm=0.5), CONTROL)
    assert "the grad norm is off by a factor of 0.5" in verdict.cause
    assert verdict.cause_class is CauseClass.UNKNOWN


QUIET = 1e-6 * np.random.default_rng(9).standard_normal(STEPS)
"""Rounding: so little is left of it over the run."""


def slightly_off(loss=1.0, norm=1.0, steps=STEPS):
    """The verdict beside repeats that only rounding separates."""

    def rounded(name, loss, norm, at):
        off = 1 + np.roll(QUIET, at)[:steps]
        signals = {"loss": LOSS[:steps] * loss * off, "grad_norm": NORM[:steps] * norm * off}
        return Evidence(name, f"{name}.csv", AT[:steps], signals)

    control = rounded("control", 1.0, 1.0, 0)
    repeats = [rounded(f"r{at}", 1.0, 1.0, at) for at in (3, 5, 7, 11)]
    verdict = judge(rounded("test", loss, norm, 13), control, calibrate(control, repeats))
    assert verdict.judgement is Judgement.FAIL, verdict.cause
    return verdict


@pytest.mark.parametrize("factor", [0.99, 1.003, 1.01, 1.03, 1.12])
def test_one_factor_at_every_step_is_named_however_near_to_one_it_is(factor):
    loss = slightly_off(loss=factor)
    assert f"only the metric is wrong: the loss is {factor:g} times the control's" in loss.cause
    assert loss.cause_class is CauseClass.METRIC_ONLY
    norm = slightly_off(norm=factor)
    assert f"the grad norm is off by a factor of {factor:g}, the same at every" in norm.cause
    # The same by a margin, where no repeat shows the noise.
    by_margin = judge(curve(loss=factor), CONTROL, margin=5e-4)
    assert f"the loss is {factor:g} times the control's" in by_margin.cause


@pytest.mark.parametrize(
    "ratio",
    [
        1 + 0.01 * AT / STEPS,  # grows with the run
        1 + 0.01 * LOSS[-1] / LOSS,  # a constant that is added
        1 + 0.01 * (1 + 0.3 * np.sin(AT)),  # the norm without a part, whose share changes
        np.where(AT > 50, 1.01, 1.0),
    ],
)
def test_what_changes_beside_its_distance_from_one_is_no_factor(ratio):
    for verdict in (slightly_off(loss=ratio), slightly_off(norm=ratio)):
        assert "times the control's" not in verdict.cause
        assert "factor" not in verdict.cause
        assert verdict.cause_class is not CauseClass.METRIC_ONLY


def test_a_few_steps_do_not_show_a_factor_near_one():
    assert "a factor of 1.01" in slightly_off(norm=1.01, steps=8).cause
    assert "factor" not in slightly_off(norm=1.01, steps=7).cause
    assert "a factor of 1.1" in slightly_off(norm=1.1, steps=7).cause


def test_a_loss_that_turns_nan_fails():
    nan = curve(loss=np.where(AT > 50, math.nan, 1.0))
    assert judge(nan, CONTROL).cause_class is CauseClass.NOT_FINITE


@pytest.mark.parametrize("seed", range(5))
def test_a_margin_that_was_asked_for_decides_what_is_not_gross(seed):
    """The example of ``converge compare --help``: long noisy curves, the same mean within 0.5%."""
    long = np.arange(1, 4001)
    losses = 2.0 + 5.0 * long**-0.3
    random = np.random.default_rng(seed)
    control, right, biased = (
        Evidence("run", f"{at}.csv", long, {"loss": losses * (1 + bias + noise)})
        for at, bias in enumerate((0.0, 0.0, 0.02))
        for noise in [2e-2 * random.standard_normal(long.size)]
    )
    assert judge(right, control).judgement is Judgement.INCONCLUSIVE
    assert judge(right, control, margin=5e-3).judgement is Judgement.PASS
    assert judge(biased, control, margin=5e-3).judgement is Judgement.FAIL
    assert judge(biased, control).judgement is Judgement.INCONCLUSIVE


def test_the_same_within_rounding_passes():
    again = curve(loss=1 + 1e-7 * np.sin(AT), norm=1 + 1e-5 * np.cos(AT))
    assert judge(again, CONTROL).judgement is Judgement.PASS


def test_a_tolerance_decides_single_steps_and_no_mean():
    wobbling = curve(loss=1 + 5e-3 * np.where(AT % 2, 1.0, -1.0))
    assert judge(wobbling, CONTROL).judgement is Judgement.INCONCLUSIVE
    assert judge(wobbling, CONTROL, tolerances={"loss": 1e-2}).judgement is Judgement.PASS
    assert judge(wobbling, CONTROL, tolerances={"loss": 1e-3}).judgement is Judgement.FAIL
    higher = judge(curve(loss=1.02), CONTROL, tolerances={"loss": 0.2})
    assert higher.judgement is Judgement.INCONCLUSIVE
    assert "nobody set a margin" in higher.cause


def test_what_is_nearly_learnt_by_heart_may_be_off_by_any_factor():
    small = 8.0 * np.exp(-AT / 5)
    control, test = (
        Evidence("run", f"{factor}.csv", AT, {"loss": np.where(AT > 40, factor * small, small)})
        for factor in (1.0, 3.0)
    )
    assert judge(test, control).judgement is Judgement.INCONCLUSIVE


def test_a_repeat_has_to_be_one_run_that_counts_its_steps_as_the_control_does():
    """Else other updates would be taken for noise; as long as its control, and one step earlier."""
    repeats = [curve(f"r{each}", seed=100 + each) for each in range(4)]
    assert not calibrate(CONTROL, repeats).problems
    early = replace(repeats[3], steps=AT - 1)
    (problem,) = calibrate(CONTROL, [*repeats[:3], early]).problems
    assert "the repeat r3 counts its steps from 0 (0 to 99), and the control from 1" in problem
    conflicts = {"replayed": (9,), "replay_conflicts": (ReplayConflict(9, "loss 6.8, then 6.9"),)}
    twice = replace(repeats[3], **conflicts)
    (problem,) = calibrate(CONTROL, [*repeats[:3], twice]).problems
    assert "the repeat r3 has steps twice, with other values, step 9: loss 6.8" in problem
    assert "two runs are in one file" in problem


@pytest.mark.parametrize("every", [1, 5])
def test_curves_that_count_from_0_and_from_1_are_not_judged_by_each_other(every):
    """With limits from repeats a right run would FAIL as another curve."""
    rows = slice(None, None, every)
    calibration = calibrate(CONTROL, [curve(f"r{each}", seed=100 + each) for each in range(5)])

    def logged(run, first):
        signals = {name: each[rows] for name, each in run.signals.items()}
        return replace(run, steps=AT[rows] - 1 + first, signals=signals)

    right = curve(seed=1)
    for limits in (None, calibration):
        for test, control in ((0, 1), (1, 0)):
            verdict = judge(logged(right, test), logged(CONTROL, control), limits, margin=0.02)
            assert verdict.judgement is Judgement.INVALID
            assert f"test counts its steps from {test} ({test} to" in verdict.cause
            assert verdict.next_command.endswith("--count-from-1")
        for first in (0, 1):
            verdict = judge(logged(right, first), logged(CONTROL, first), None, margin=0.02)
            assert verdict.judgement is Judgement.PASS, verdict.cause


def test_a_control_that_is_not_finite_is_named_once():
    nan = curve("nan", loss=np.where(AT == 51, math.nan, 1.0))
    assert judge(curve(), nan).cause == "the control nan is not finite: loss is nan at step 51"
    found = calibrate(CONTROL, [nan]).problems
    assert found == ("the repeat nan is not finite: loss is nan at step 51",)
    blown = judge(nan, CONTROL)
    assert "training blew up: loss is nan at step 51, where the control" in blown.cause
