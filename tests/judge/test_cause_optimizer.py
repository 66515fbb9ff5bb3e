"""Causes from what the optimizer keeps: lost state, skipped updates, clipping that changes."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    CONTROL,
    broken,
    changed,
    scaled,
    since,
    turned,
    verdict_of,
)

from converge_harness.model import CauseClass, Judgement, PostStepState, Precision

MAX_NORM = 1.0
NAMES = CONTROL.samples[0].names


def kept(run, count=lambda step, name: step, clip=lambda step: MAX_NORM, moments=None):
    """The run with what clipping and Adam leave behind; every argument may be wrong.

    ``moments`` maps step, state and name to the state's norm over the right one.
    """
    samples = []
    for sample in run.samples:
        if sample.gradients is None:
            samples.append(sample)
            continue
        norm = sample.gradients.norm
        whole = float(np.linalg.norm(norm))
        clipped = norm * min(1.0, clip(sample.step) / whole)
        states = np.stack([clipped / 2, clipped**2 / 3], axis=1)
        for column, state in enumerate(("exp_avg", "exp_avg_sq")):
            for row, name in enumerate(NAMES if moments else ()):
                states[row, column] *= moments(sample.step, state, name)
        steps = np.array([float(count(sample.step, name)) for name in NAMES])
        left = PostStepState(clipped, ("exp_avg", "exp_avg_sq"), states, steps)
        samples.append(replace(sample, post_step=left))
    return replace(run, samples=tuple(samples))


REFERENCE = kept(CONTROL)


def lost(run=None, **wrong):
    """A run that leaves its control suddenly at step 7, and whose gradients differ from 8 on."""
    run = run or broken(update=since(8, turned(lambda _: True, 0.5)), gradient=apart)
    run = changed(run, lambda step, x: x * (1 + 1e-2 * (step > 6)), *BOTH_LOSSES, *BOTH_NORMS)
    return verdict_of(kept(run, **wrong), REFERENCE)


apart = since(8, turned(lambda _: True, 0.3))


def test_counters_that_started_over_say_when_the_state_was_lost():
    verdict = lost(count=lambda step, _: step if step < 6 else step - 5)
    assert verdict.cause_class is CauseClass.STATE
    assert "optimizer state is lost after step 5" in verdict.cause
    assert "at step 8 the optimizer has counted 3 updates of all 35 parameters" in verdict.cause
    assert "the control's 8" in verdict.cause
    assert "every pipeline stage's" in verdict.look_at


def test_counters_that_part_before_any_gradient_are_named_and_not_what_follows_from_them():
    """As AdamW without bias correction leaves it: the gradients of step 2 are at other weights."""
    run = broken(gradient=since(2, turned(lambda _: True, 0.5)))
    found = verdict_of(kept(run, count=lambda step, _: step + 1e6), REFERENCE)
    assert found.cause_class is CauseClass.UPDATE
    assert "at step 1 the optimizer has counted 1e+06 updates of all 35 parameters" in found.cause
    late = verdict_of(kept(run, count=lambda step, _: step + 1e6 * (step > 2)), REFERENCE)
    assert late.cause_class is CauseClass.GRADIENT_DIRECTION


def test_counters_of_one_stage_name_its_parameters():
    stage = ("layers.2.", "layers.3.", "norm.", "output.")
    verdict = lost(count=lambda step, name: step - 5 * (step > 5 and name.startswith(stage)))
    assert verdict.cause_class is CauseClass.STATE
    assert "layers 2-3" in verdict.cause
    assert "output.weight" in verdict.cause


def test_counters_of_some_ranks_are_lost_state():
    verdict = lost(count=lambda step, _: step - 2.5 * (step > 5))
    assert verdict.cause_class is CauseClass.STATE
    assert "on some ranks" in verdict.cause


def test_a_skipped_update_is_no_lost_state():
    verdict = lost(count=lambda step, _: step - (step > 5))
    assert verdict.cause_class is CauseClass.UPDATE
    assert "updates are skipped or repeated since step 4" in verdict.cause


OTHER_CLIPPING = {
    "off": (lambda step: np.inf if step > 5 else MAX_NORM, "they are not clipped at all"),
    "to another norm": (lambda step: 2.0 if step > 5 else MAX_NORM, "clipped to 2 where 1 is"),
}


@pytest.mark.parametrize("case", OTHER_CLIPPING)
def test_clipping_that_changes_is_named(case):
    clip, words = OTHER_CLIPPING[case]
    verdict = lost(clip=clip)
    assert verdict.cause_class is CauseClass.CLIPPING
    assert "after step 4, where they still were, and at step 8" in verdict.cause
    assert words in verdict.cause
    assert "max_norm" in verdict.look_at


def test_clipping_that_stays_is_not_blamed():
    verdict = lost()
    assert verdict.cause_class is CauseClass.LATER
    assert "clip" not in verdict.cause


def without(state):
    return lambda step, kind, name: 0.2 if step >= 8 and kind == state else 1.0


def test_moments_that_differ_under_right_gradients_were_lost():
    wrong = since(8, turned(lambda _: True, 0.5))
    verdict = lost(broken(update=wrong), moments=without("exp_avg_sq"))
    assert verdict.cause_class is CauseClass.STATE
    assert "exp_avg_sq of all 35 parameters is 0.2 to 0.2 times" in verdict.cause


def test_moments_follow_gradients_that_differ():
    verdict = lost(moments=without("exp_avg_sq"))
    assert verdict.cause_class is not CauseClass.STATE


def test_moments_that_follow_gradients_within_their_limits_are_not_lost():
    """In low precision both differ by more than in fp32; what fails is something else."""
    low = {"precision": Precision.BF16}
    run = broken(gradient=turned(lambda _: True, 0.005))
    run = changed(run, lambda step, x: x * (1 + 0.3 * (step > 6)), *BOTH_LOSSES, *BOTH_NORMS)
    run = kept(run, moments=lambda step, *_: 1.006 if step > 4 else 1.0)
    verdict = verdict_of(replace(run, **low), replace(REFERENCE, **low))
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is not CauseClass.STATE


def betas(moments):
    wrong = since(2, turned(lambda _: True, 0.1))
    run = changed(broken(update=wrong), lambda step, x: x * (1 + 1e-3 * (step > 2)), *BOTH_LOSSES)
    return verdict_of(kept(run, moments=moments), REFERENCE)


def test_moments_that_are_all_one_multiple_are_averaged_otherwise():
    verdict = betas(lambda step, state, _: 0.98 if state == "exp_avg_sq" else 1.0)
    assert verdict.cause_class is CauseClass.UPDATE
    assert "exp_avg_sq is 0.98 times the control's, so 1 - beta2 is 0.98" in verdict.cause
    assert "betas" in verdict.look_at


NO_BETAS = {
    "of some": lambda step, _, name: 0.98 if "norm" in name else 1.0,
    "of another size each": lambda step, _, name: 0.98 + 0.01 * (len(name) % 3),
    "later": lambda step, *_: 0.98 if step > 4 else 1.0,
}


@pytest.mark.parametrize("case", NO_BETAS)
def test_other_moments_are_not_averaged_otherwise(case):
    assert "averages gradients differently" not in betas(NO_BETAS[case]).cause


def test_moments_of_other_gradients_are_not_averaged_otherwise():
    run = kept(broken(gradient=scaled(0.99)), clip=lambda _: np.inf)
    reference = kept(CONTROL, clip=lambda _: np.inf)
    assert verdict_of(run, reference).cause_class is CauseClass.GRADIENT_SCALE
