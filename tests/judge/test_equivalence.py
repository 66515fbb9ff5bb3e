"""Tier 3: enough evidence of a small difference passes, of a large one fails, and else neither."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from converge_harness.judge.calibration import calibrate
from converge_harness.judge.checks.equivalence import loss_equivalent
from converge_harness.judge.compare.tost import FEWEST, Answer, equivalence
from converge_harness.judge.comparison import RunComparison
from converge_harness.model import Evidence, Outcome, Precision, Tier

MARGIN = 1e-3
STEPS = 100


def noise(steps, scale, *, correlation=0.0, seed=2):
    """AR(1) noise of the given standard deviation."""
    generator = np.random.default_rng(seed)
    values = np.empty(steps)
    value = generator.standard_normal()
    for index, shock in enumerate(generator.standard_normal(steps)):
        value = correlation * value + math.sqrt(1 - correlation**2) * shock
        values[index] = value
    return scale * values


# ------------------------------------------------------------- the statistics


@pytest.mark.parametrize(
    ("bias", "scale", "answer"),
    [
        (0.0, 1e-6, Answer.EQUIVALENT),
        (5e-4, 2e-4, Answer.EQUIVALENT),
        (2e-3, 2e-4, Answer.DIFFERENT),
        (-2e-3, 2e-4, Answer.DIFFERENT),
        (1e-3, 2e-4, Answer.INCONCLUSIVE),
        (0.0, 1e-2, Answer.INCONCLUSIVE),
    ],
)
def test_a_mean_is_equivalent_only_when_its_whole_interval_is_within_the_margin(
    bias, scale, answer
):
    found = equivalence(bias + noise(STEPS, scale), MARGIN)
    assert found.outcome is answer
    assert (found.bound <= MARGIN) == (answer is Answer.EQUIVALENT)


def test_a_mean_at_the_margin_is_rarely_equivalent_and_rarely_different():
    """Error rates of at most 5% each; docs/operating-characteristics.md has them measured."""
    answers = [
        equivalence(MARGIN + noise(STEPS, 2e-4, correlation=0.5, seed=seed), MARGIN).outcome
        for seed in range(400)
    ]
    assert answers.count(Answer.EQUIVALENT) < 0.08 * len(answers)
    assert answers.count(Answer.DIFFERENT) < 0.08 * len(answers)


def test_series_without_variance_have_intervals_without_width():
    same, apart = equivalence(np.zeros(20), MARGIN), equivalence(np.full(20, 2e-3), MARGIN)
    assert (same.outcome, same.mean, same.half_width) == (Answer.EQUIVALENT, 0.0, 0.0)
    assert (apart.outcome, apart.mean, apart.half_width) == (Answer.DIFFERENT, 2e-3, 0.0)


def test_a_drift_beyond_the_margin_is_not_equivalent_though_its_mean_is_within():
    drifting = np.linspace(0.0, 1.3e-3, STEPS) + noise(STEPS, 1e-6)
    found = equivalence(drifting, MARGIN)
    assert found.mean + found.half_width < MARGIN < found.end
    assert found.outcome is not Answer.EQUIVALENT
    shuffled = np.random.default_rng(1).permutation(drifting)
    assert equivalence(shuffled, MARGIN).outcome is Answer.EQUIVALENT  # the same mean, no drift


def test_a_long_drift_beyond_the_margin_is_different():
    drifting = np.linspace(0.0, 1.6e-3, 3000) + noise(3000, 1e-6)
    assert equivalence(drifting, MARGIN).outcome is Answer.DIFFERENT


def test_autocorrelation_widens_the_interval():
    plain, sticky = (
        np.mean(
            [
                equivalence(noise(STEPS, 1e-4, correlation=rho, seed=seed), MARGIN).half_width
                for seed in range(20)
            ]
        )
        for rho in (0.0, 0.9)
    )
    assert sticky > 2 * plain  # sqrt((1 + 0.9) / (1 - 0.9)) is 4.4 for endless series


def test_rounding_of_a_log_widens_the_interval():
    exact, rounded = (equivalence(np.zeros(20), MARGIN, rounding=size) for size in (0.0, 2e-3))
    assert exact.outcome is Answer.EQUIVALENT
    assert (rounded.outcome, rounded.further_steps) == (Answer.INCONCLUSIVE, None)


def test_further_steps_settle_it_about_as_often_as_promised():
    settled = foreseen = 0
    for seed in range(200):
        long = noise(4000, 1.5e-3, correlation=0.5, seed=seed)
        found = equivalence(long[:40], MARGIN)
        if found.further_steps is None:
            continue
        foreseen += 1
        later = equivalence(long[: min(40 + found.further_steps, long.size)], MARGIN)
        settled += later.outcome is not Answer.INCONCLUSIVE
    assert foreseen > 50
    assert settled / foreseen > 0.7


def test_nothing_is_foreseen_next_to_the_margin():
    found = equivalence(MARGIN + noise(STEPS, 1e-4), MARGIN)
    assert (found.outcome, found.further_steps) == (Answer.INCONCLUSIVE, None)


@pytest.mark.parametrize("steps", [0, 1, FEWEST - 1])
def test_too_few_steps_are_inconclusive_and_say_how_many_are_missing(steps):
    found = equivalence(np.zeros(steps), MARGIN)
    assert (found.outcome, found.further_steps) == (Answer.INCONCLUSIVE, FEWEST - steps)


@pytest.mark.parametrize(
    ("difference", "margin", "alpha", "words"),
    [
        ([0.0, math.nan], MARGIN, 0.05, "difference 1 is nan"),
        ([0.0, math.inf], MARGIN, 0.05, "difference 1 is inf"),
        ([0.0], 0.0, 0.05, "margin is 0"),
        ([0.0], math.nan, 0.05, "margin is nan"),
        ([0.0], MARGIN, 0.5, "alpha is 0.5"),
    ],
)
def test_unusable_numbers_are_refused_by_name(difference, margin, alpha, words):
    with pytest.raises(ValueError, match=words):
        equivalence(np.array(difference), margin, alpha)


@given(
    difference=st.lists(st.floats(-1e-2, 1e-2), min_size=FEWEST, max_size=60).map(np.array),
    margin=st.floats(1e-5, 1e-1),
)
def test_a_sign_turns_nothing_and_a_wider_margin_never_hurts(difference, margin):
    found = equivalence(difference, margin)
    turned = equivalence(-difference, margin)
    assert (turned.outcome, turned.mean) == (found.outcome, -found.mean)
    wider = equivalence(difference, 2 * margin)
    if found.outcome is Answer.EQUIVALENT:
        assert wider.outcome is Answer.EQUIVALENT
    if wider.outcome is Answer.DIFFERENT:
        assert found.outcome is Answer.DIFFERENT


# ------------------------------------------------------------------ the check


def curve(difference=0.0, *, steps=STEPS, signal="loss", spacing=1, **more):
    """A falling loss, off by a relative difference (a number or one per step)."""
    at = spacing * np.arange(1, steps + 1)
    losses = 8.0 * at**-0.1 * (1 + np.broadcast_to(difference, steps))
    return Evidence("run", "run.csv", at, {signal: losses}, **more)


def asked(test, control=None, *, repeats=(), **more):
    control = control or curve()
    calibration = calibrate(control, repeats) if repeats else None
    return loss_equivalent(
        RunComparison(test=test, control=control, calibration=calibration, **more)
    )


def test_the_check_judges_the_second_half_against_its_margin():
    check = asked(curve(np.where(np.arange(STEPS) < 50, 0.5, 0.0) + noise(STEPS, 1e-5)))
    assert check.tier is Tier.EQUIVALENCE
    assert check.outcome is Outcome.PASS
    assert check.steps == (51, 100)
    assert check.measured < check.limit.value == MARGIN


def test_a_lasting_bias_beyond_the_margin_fails():
    check = asked(curve(3e-3 + noise(STEPS, 1e-5)))
    assert check.outcome is Outcome.FAIL
    assert check.measured > check.limit.value
    assert "+0.003" in check.detail


def test_too_little_evidence_says_how_many_further_steps_would_do():
    check = asked(curve(noise(STEPS, 5e-3)))
    assert check.outcome is Outcome.INCONCLUSIVE
    assert "further steps would settle it" in check.detail


def test_a_mean_next_to_the_margin_says_which_margin():
    check = asked(curve(1e-2 * (1 + 0.01 * np.sin(np.arange(STEPS)))), margin=1e-2)
    assert check.outcome is Outcome.INCONCLUSIVE
    assert "too near the margin of 0.01 to say" in check.detail


def test_further_steps_are_steps_of_the_run_not_points_of_its_log():
    def further(spacing):
        test = curve(noise(STEPS, 5e-3), spacing=spacing)
        words = asked(test, curve(spacing=spacing)).detail
        return int(words.split("about ")[1].split(" further")[0].replace(",", ""))

    assert further(10) == 10 * further(1)


@pytest.mark.parametrize(("precision", "margin"), [(Precision.FP32, 1e-3), (Precision.BF16, 1e-2)])
def test_a_coarser_run_has_a_wider_default_margin(precision, margin):
    assert asked(curve(precision=precision)).limit.value == margin


def test_a_margin_of_the_file_replaces_the_default():
    test = curve(3e-3)
    assert asked(test).outcome is Outcome.FAIL
    assert asked(test, margin=5e-3).outcome is Outcome.PASS


def test_a_tolerance_of_single_steps_widens_no_margin():
    check = asked(curve(2e-2), tolerances={"loss": 0.2})
    assert (check.outcome, check.limit.value) == (Outcome.FAIL, 1e-3)


def test_the_recomputed_loss_is_judged_where_both_runs_have_it():
    """A wrong metric is another check's finding: the training itself is equivalent."""
    right, wrong = curve().signals["loss"], curve(1.0).signals["loss"]
    both = curve(signal="loss_recomputed")
    test = Evidence("t", "t", both.steps, {"loss": wrong, "loss_recomputed": right})
    control = Evidence("c", "c", both.steps, {"loss": right, "loss_recomputed": right})
    assert asked(test, control).outcome is Outcome.PASS
    assert asked(test).outcome is Outcome.FAIL


def test_what_right_runs_do_for_good_is_no_failure_and_more_than_that_is():
    """Chaotic training: repeats of the control stay apart, each on its own side."""
    lasting = (1e-3, -2e-3, 1.5e-3, -5e-4, 2e-3)
    repeats = [curve(bias + noise(STEPS, 1e-4, seed=i)) for i, bias in enumerate(lasting)]
    test = curve(4e-3 + noise(STEPS, 1e-4))
    check = asked(test, repeats=repeats)
    assert check.outcome is Outcome.INCONCLUSIVE
    assert "repeats are off by 0.002" in check.detail
    assert asked(test).outcome is Outcome.FAIL
    quiet = [curve(bias / 100) for bias in lasting]
    assert asked(test, repeats=quiet).outcome is Outcome.FAIL
    assert asked(curve(5e-2 + noise(STEPS, 1e-4)), repeats=repeats).outcome is Outcome.FAIL


LASTING = (1e-3, -2e-3, 1.5e-3, -5e-4, 2e-3)
LOWER = 1 / (1 + np.minimum(LASTING, 0))
"""Differences are relative to the smaller of two losses."""
USUAL = float(stats.t.ppf(0.975, 5) * np.sqrt(np.mean(np.square(LASTING * LOWER))))
"""One correct run in 20 is off by more, if repeats are off by LASTING: 0.0039."""


def short(bias, *, steps=20, repeats=LASTING, **more):
    """A short run that is off by a bias, with repeats that are off by theirs."""
    others = [curve(each, steps=steps) for each in repeats]
    return asked(curve(bias, steps=steps), curve(steps=steps), repeats=others, **more)


@pytest.mark.parametrize("bias", [USUAL, -USUAL / (1 + USUAL)], ids=["above", "below"])
def test_a_short_run_within_what_repeats_show_is_not_asked_and_beyond_it_is(bias):
    within = short(bias * (1 - 1e-6))
    assert within.outcome is Outcome.SKIPPED
    assert "too short to tell" in within.detail
    assert "1 correct run in 20 is off by more than 0.0039, at the end 0.0039" in within.detail
    assert short(bias * (1 + 1e-6)).outcome is Outcome.INCONCLUSIVE
    assert short(12 * bias).outcome is Outcome.FAIL


def test_noise_within_what_repeats_show_is_not_asked_either():
    wobble = 1e-3 * np.where(np.arange(20) % 4 < 2, 1.0, -1.0)
    assert short(1.5e-3 + wobble).outcome is Outcome.SKIPPED
    assert short(5e-3 + 2 * wobble).outcome is Outcome.INCONCLUSIVE


def test_a_drift_beyond_what_repeats_end_with_is_asked_though_its_mean_is_not():
    rising = np.linspace(-2e-3, 2e-3, 10)
    drift = np.concatenate([np.zeros(10), 3e-3 + rising])
    assert 3e-3 < USUAL < 5e-3
    assert short(drift).outcome is Outcome.INCONCLUSIVE
    repeats = [np.concatenate([np.zeros(10), each + rising]) for each in LASTING]
    assert short(drift, repeats=repeats).outcome is Outcome.SKIPPED


def test_what_repeats_show_excuses_no_long_run_and_none_with_a_margin():
    for steps, outcome in ((63, Outcome.SKIPPED), (64, Outcome.INCONCLUSIVE)):
        assert short(3e-3, steps=steps).outcome is outcome
    assert short(3e-3, margin=1e-3).outcome is Outcome.INCONCLUSIVE


def test_few_quiet_or_unknown_repeats_excuse_no_short_run():
    assert short(3e-3, repeats=LASTING[:2]).outcome is Outcome.INCONCLUSIVE
    assert short(1.5e-3, repeats=np.divide(LASTING, 100)).outcome is Outcome.FAIL
    control = curve(steps=20)
    learnt = calibrate(control, [curve(each, steps=20) for each in LASTING])
    older = {name: replace(scale, ending=None) for name, scale in learnt.signals.items()}
    case = RunComparison(curve(3e-3, steps=20), control, replace(learnt, signals=older))
    assert loss_equivalent(case).outcome is Outcome.INCONCLUSIVE
    finer = curve(steps=20, precision=Precision.FP32)
    coarser = curve(1.2e-2, steps=20, precision=Precision.BF16)
    assert loss_equivalent(RunComparison(coarser, finer, learnt)).outcome is Outcome.FAIL


def test_what_repeats_show_excuses_no_more_than_repeats_may_be_apart():
    loud = [5 * each for each in LASTING]
    assert short(0.99e-2, repeats=loud).outcome is Outcome.SKIPPED
    assert short(1.01e-2, repeats=loud).outcome is Outcome.INCONCLUSIVE


def test_what_a_console_log_rounds_off_is_no_evidence_of_equivalence():
    rounded = curve(rounding={"loss": 0.05})
    assert asked(rounded).outcome is Outcome.INCONCLUSIVE


def test_a_short_noisy_run_is_not_asked_unless_it_looks_off_or_somebody_set_a_margin():
    wobble = 1e-3 * np.where(np.arange(200) % 4 < 2, 1.0, -1.0)
    short, long = (curve(wobble[:steps], steps=steps) for steps in (20, 100))
    assert asked(short, curve(steps=20)).outcome is Outcome.SKIPPED
    assert asked(short, curve(steps=20), margin=1e-4).outcome is Outcome.INCONCLUSIVE
    off = curve(1.5e-3 + wobble[:20], steps=20)
    assert asked(off, curve(steps=20)).outcome is Outcome.INCONCLUSIVE
    assert asked(long, curve(steps=100)).outcome is Outcome.PASS


def test_short_or_absent_curves_are_skipped_and_broken_ones_are_invalid():
    assert asked(curve(steps=15)).outcome is Outcome.SKIPPED
    assert asked(curve(steps=16)).outcome is Outcome.PASS
    assert asked(curve(signal="grad_norm")).outcome is Outcome.SKIPPED
    for few in (0, 1, 10, 15):
        check = asked(curve(2e-2, steps=few), curve(steps=few), margin=1e-3)
        assert check.outcome is Outcome.INCONCLUSIVE
        assert f"margin of 0.001: {few} steps in common, at least 16" in check.detail
    broken = asked(curve(np.where(np.arange(STEPS) == 70, math.nan, 0.0)))
    assert (broken.outcome, broken.onset) == (Outcome.INVALID, 71)
