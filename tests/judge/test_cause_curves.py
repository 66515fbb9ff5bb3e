"""Causes that show after the first steps: rounding that grows, lost state, glitches, restarts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    CONTROL,
    broken,
    changed,
    since,
    turned,
    verdict_of,
)
from judge_examples import LOSSES, STEPS, foreign, judge, run, with_signals

from converge_harness.judge import calibrate
from converge_harness.model import CauseClass, Judgement, Precision, ReplayConflict

ALL = (*BOTH_LOSSES, *BOTH_NORMS)


def growing(start, rate):
    """A relative difference that grows exponentially."""
    return lambda step, x: x * (1 + start * math.exp(rate * step))


def jumping(at, before, after):
    return lambda step, x: x * (1 + (after if step >= at else before))


# --------------------------------------------------------------- rounding grows


def test_rounding_that_grows_smoothly_is_benign():
    verdict = verdict_of(changed(broken(noise=1e-7), growing(2e-8, 0.4), *BOTH_LOSSES))
    assert verdict.cause_class is CauseClass.ROUNDING_GROWTH
    assert "loss differs by 3e-08 at step 1, inside the limit of rounding" in verdict.cause
    assert "doubling every 1.7 steps, to 6e-05 at step 20" in verdict.cause
    assert "no step and no tensor stands out" in verdict.cause
    assert "calibrate over as many steps" in verdict.look_at


def test_without_sketches_no_tensor_is_spoken_of():
    control = foreign("b", loss=LOSSES)
    # A rerun that is the same to the last bit: without one, such a difference is left open.
    verdict = judge(
        changed(foreign("a", loss=LOSSES), growing(2e-7, 0.4), "loss"),
        control,
        calibrate(control, [control]),
    )
    assert verdict.cause_class is CauseClass.ROUNDING_GROWTH
    assert "tensor" not in verdict.cause


NOT_ROUNDING = {
    "abrupt": jumping(10, 1e-8, 1e-4),
    "a jump on the way": lambda step, x: growing(2e-8, 0.1)(step, x) * (1 + 1e-4 * (step > 9)),
    "linear": lambda step, x: x * (1 + 2e-6 * (step - 1)),
    "constant": lambda step, x: x * (1 + 1e-4 * (step > 2)),
    "outside at first": growing(1e-4, 0.2),
}


@pytest.mark.parametrize("case", NOT_ROUNDING)
def test_other_growth_is_not_rounding(case):
    test = changed(broken(), NOT_ROUNDING[case], *BOTH_LOSSES)
    assert verdict_of(test).cause_class is not CauseClass.ROUNDING_GROWTH


def test_rounding_does_not_single_out_a_tensor():
    wrong = since(8, turned(lambda name: "wq" in name, 1e-2))
    test = changed(broken(gradient=wrong), growing(2e-8, 0.4), *BOTH_LOSSES)
    verdict = verdict_of(test)
    assert verdict.cause_class is not CauseClass.ROUNDING_GROWTH
    assert "layers.*.attention.wq.weight" in verdict.cause


def test_all_tensors_together_may_be_outside_late():
    drift = since(16, turned(lambda name: True, 3e-4))
    test = changed(broken(gradient=drift), growing(2e-8, 0.4), *BOTH_LOSSES)
    assert verdict_of(test).cause_class is CauseClass.ROUNDING_GROWTH


def test_a_law_that_the_repeats_follow_is_rounding_and_another_is_not():
    def run_by(law, size, name="t"):
        return changed(run(name, samples=()), lambda s, x: x * (1 + size * law(s)), *ALL)

    def cubic(step):
        return step**3

    control = run(samples=())
    sizes = np.linspace(-1.2e-9, 1.2e-9, 12)
    calibration = calibrate(control, [run_by(cubic, size, f"ulp{size}") for size in sizes])
    same = verdict_of(run_by(cubic, 4e-8), control, calibration=calibration)
    assert same.cause_class is CauseClass.ROUNDING_GROWTH
    steeper = run_by(lambda step: math.exp(0.6 * step), 3e-9)
    verdict = verdict_of(steeper, control, calibration=calibration)
    assert verdict.cause_class is not CauseClass.ROUNDING_GROWTH


# --------------------------------------------------------------- gradients, later


def test_gradients_that_turn_later_while_the_loss_is_right():
    test = changed(broken(), lambda s, x: x * (1.2 + 0.1 * (s % 2)) if s > 6 else x, *BOTH_NORMS)
    verdict = verdict_of(changed(test, jumping(8, 0, 1e-3), *BOTH_LOSSES))
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    assert verdict.cause.startswith("from step 7 on the backward pass differs")
    assert verdict.look_at.startswith("what changes at step 7: reductions that a flag")


def test_a_norm_that_drifts_out_of_its_envelope_is_no_jump():
    drift = changed(broken(), lambda step, x: x * (1 + 5e-7 * step**1.5), *BOTH_NORMS)
    assert verdict_of(drift).cause_class is CauseClass.LATER


def test_loss_and_norm_that_jump_together_are_state():
    verdict = verdict_of(changed(broken(), jumping(7, 0, 1e-2), *ALL))
    assert verdict.cause_class is CauseClass.LATER
    assert "agree until step 7, where" in verdict.cause
    assert "is suddenly off" in verdict.cause
    assert "optimizer moments" in verdict.look_at


# ------------------------------------------------------------------- clipping


def test_a_wrong_norm_that_clips_is_a_metric_that_training_follows():
    test = changed(broken(), lambda _, x: 0.7 * x, "grad_norm")
    test = changed(test, jumping(2, 0, 1e-3), *BOTH_LOSSES, "grad_norm_recomputed")
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.METRIC_ONLY
    assert "a wrong norm, and clipping uses it, so training follows (off from step 2 on)" in (
        verdict.cause
    )
    both = changed(test, lambda _, x: 0.7 * x, "grad_norm_recomputed")
    assert verdict_of(both).cause_class is CauseClass.GRADIENT_SCALE


# -------------------------------------------------------------------- restarts


def test_replayed_steps_that_differ_are_lost_state():
    test = changed(broken(), jumping(9, 0, 1e-2), *ALL)
    test = replace(
        test, replayed=(9, 10), replay_conflicts=(ReplayConflict(9, "loss 6.8, then 6.9"),)
    )
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.STATE
    assert "state is lost at a restart: replayed steps differ, step 9: loss 6.8" in verdict.cause
    assert "checkpoint" in verdict.look_at


def test_parting_right_after_replayed_steps_is_lost_state_and_long_after_is_not():
    test = changed(broken(), jumping(11, 0, 1e-2), *ALL)
    assert verdict_of(replace(test, replayed=(9, 10))).cause_class is CauseClass.STATE
    assert verdict_of(replace(test, replayed=(3, 4))).cause_class is CauseClass.LATER


def test_a_conflict_after_the_runs_parted_is_not_the_cause():
    test = changed(broken(), jumping(4, 0, 1e-2), *ALL)
    test = replace(
        test, replayed=(9, 10), replay_conflicts=(ReplayConflict(9, "loss 6.8, then 6.9"),)
    )
    assert verdict_of(test).cause_class is CauseClass.LATER


def test_a_loader_that_starts_over_is_recognised():
    digests = CONTROL.batch_digests
    test = changed(broken(), jumping(11, 0, 1e-2), *ALL)
    verdict = verdict_of(replace(test, batch_digests=digests[:10] + digests[: STEPS - 10]))
    assert verdict.cause_class is CauseClass.DATA
    assert "these samples are the control's of step 1: it seems to have started over" in (
        verdict.cause
    )
    fresh = verdict_of(replace(test, batch_digests=digests[:10] + ("f" * 16,) * 10))
    assert fresh.cause_class is CauseClass.DATA
    assert "started over" not in fresh.cause


def test_a_schedule_that_starts_over_is_recognised():
    control = with_signals(CONTROL, lr=lambda step, x: x * step)
    test = with_signals(broken(), lr=lambda step, x: x * (step if step < 11 else step - 10))
    test = changed(test, jumping(12, 0, 1e-2), *ALL)
    verdict = verdict_of(test, control)
    assert verdict.cause_class is CauseClass.LEARNING_RATE
    assert "this rate is the control's of step 1: it seems to have started over" in verdict.cause
    # The optimizer kept its rate, so nothing shows before the rate should fall.
    rate = CONTROL.signals["lr"].values[0]
    warm = (0.5, *[1.0] * 10, *np.linspace(0.9, 0.1, STEPS - 11))
    decays = with_signals(CONTROL, lr=lambda step, _: rate * warm[step - 1])
    late = with_signals(test, lr=lambda step, _: rate * warm[step - 1 - 5 * (step > 6)])
    assert "it is 5 steps behind the control's, as a schedule that started over after step 5" in (
        verdict_of(late, decays).cause
    )
    other = with_signals(test, lr=lambda step, x: 7 * x if step > 10 else x)
    assert "started over" not in verdict_of(other, CONTROL).cause


# --------------------------------------------------------------------- glitches


def test_one_step_alone_is_a_glitch():
    test = changed(broken(), lambda step, x: 100 * x if step == 7 else x, *BOTH_LOSSES)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.GLITCH
    assert "its samples" in verdict.look_at


def test_a_step_outside_a_limit_that_widens_later_is_no_glitch():
    test = changed(broken(), lambda step, x: x * (1.012 + 0.002 * (step % 2)), "grad_norm")
    test = changed(test, lambda _, x: 1.0075 * x, "grad_norm_recomputed")
    verdict = verdict_of(replace(test, precision=Precision.BF16))
    assert verdict.cause_class is not CauseClass.GLITCH


def test_a_step_after_which_tensors_stay_off_is_no_glitch():
    test = broken(gradient=since(8, turned(lambda name: True)))
    test = changed(test, lambda step, x: 100 * x if step == 7 else x, *BOTH_LOSSES)
    assert verdict_of(test).cause_class is CauseClass.LATER


# ------------------------------------------------------------------- not finite


def test_a_blow_up_after_a_wrong_first_step_is_its_consequence():
    test = broken(gradient=turned(lambda name: "wq" in name))
    test = with_signals(test, **dict.fromkeys(ALL, lambda s, x: math.nan if s > 11 else x))
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.GRADIENT_DIRECTION
    assert verdict.cause.endswith("training then blew up at step 12")


def test_a_blow_up_alone_is_not_finite():
    test = with_signals(broken(), **dict.fromkeys(ALL, lambda s, x: math.nan if s > 11 else x))
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.NOT_FINITE
    assert "overflows" in verdict.look_at


def test_a_gradient_that_is_not_finite_beside_a_loss_that_is():
    test = broken()
    samples = list(test.samples)
    samples[2].gradients.not_finite[3] = 5
    verdict = verdict_of(replace(test, samples=tuple(samples)))
    assert verdict.cause_class is CauseClass.NOT_FINITE
    assert "5 entries of the gradient of" in verdict.cause


def test_the_control_of_these_tests_is_right():
    assert judge(broken(), CONTROL).judgement is Judgement.PASS
