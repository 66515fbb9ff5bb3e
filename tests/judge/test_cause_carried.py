"""Causes that a resume leaves: weights and optimizer state that were not carried on."""

from dataclasses import replace

import numpy as np
import pytest
from cause_examples import (
    BOTH_LOSSES,
    BOTH_NORMS,
    LR,
    MODEL,
    broken,
    changed,
    initial_weights,
    other,
    scaled,
    since,
    turned,
    verdict_of,
)

from converge_harness.model import CauseClass

ONE, TWO = "layers.1.feed_forward.w2.weight", "layers.2.attention.wq.weight"
TAUGHT = 1e-7
"""What rounding does to every tensor, relative to its norm."""


def at(step, change):
    """What a change does to the update of one sample alone."""
    return lambda now, name, x: change(now, name, x) if now == step else x


def following(size):
    """How the other parameters follow what was done to a few."""
    return since(8, turned(lambda name: True, size))


def lost(update, **changes):
    """A run whose loss leaves the control at step 6, without a reason in the data."""
    test = broken(update=update, gradient=following(0.05), noise=TAUGHT, **changes)
    jump = lambda step, x: x * (1 + 1e-3 * (step > 5) * (1 + 0.3 * (step % 2)))  # noqa: E731
    return changed(test, jump, *BOTH_LOSSES, *BOTH_NORMS)


def parted(*names, by=1.5, rest=0.02):
    def change(step, name, x):
        return x + (by if name in names else rest) * other(name, step, "lost")

    return change


# ------------------------------------------------------------------ a few parted


@pytest.mark.parametrize("names", [(ONE,), (ONE, TWO)])
def test_parameters_that_part_once_and_not_by_their_gradients_lost_their_state(names):
    verdict = verdict_of(lost(at(8, parted(*names))))
    assert verdict.cause_class is CauseClass.STATE
    assert "state is lost between steps 4 and 8" in verdict.cause
    assert all(name in verdict.cause for name in names)
    assert "leaves the control at step 6" in verdict.cause
    assert "what a resume between those steps saves and loads" in verdict.look_at


def test_parameters_that_part_with_their_gradients_lost_no_state():
    gradient = since(8, parted(ONE))
    test = lost(at(8, parted(ONE)))
    test = replace(test, samples=broken(update=at(8, parted(ONE)), gradient=gradient).samples)
    assert verdict_of(test).cause_class is not CauseClass.STATE


GOES_ON = {
    "another rate": (since(8, scaled(2, lambda name: name == ONE)), "moved 2 times as far"),
    "another direction": (since(8, parted(ONE)), "and as much later"),
}


@pytest.mark.parametrize("case", GOES_ON)
def test_parameters_that_move_otherwise_from_then_on_lost_no_state(case):
    update, words = GOES_ON[case]
    verdict = verdict_of(lost(update))
    assert verdict.cause_class is CauseClass.UPDATE
    assert ONE in verdict.cause
    assert words in verdict.cause


def test_what_parts_at_the_last_sample_may_be_lost_or_go_on():
    test = broken(update=at(16, parted(ONE)), noise=TAUGHT)
    verdict = verdict_of(changed(test, lambda s, x: x * (1 + 1e-3 * (s > 9)), *BOTH_LOSSES))
    assert verdict.cause_class is CauseClass.LATER
    assert f"the runs part between steps 8 and 16: {ONE} parts from the control" in verdict.cause


def test_all_that_part_alike_say_nothing_of_a_few():
    every = at(8, turned(lambda name: True, 0.5))
    assert verdict_of(lost(every)).cause_class is CauseClass.LATER


# ----------------------------------------------------------------- moved too far


def test_weights_that_move_once_beyond_their_rate_were_replaced():
    jump = at(8, lambda step, name, x: x + (40 if name == ONE else 15) * other(name, step, "new"))
    verdict = verdict_of(lost(jump))
    assert verdict.cause_class is CauseClass.STATE
    assert "learning rates a step, where the control moves at most" in verdict.cause
    assert "weights were replaced, or the optimizer lost its second moments" in verdict.cause


def test_weights_that_move_too_far_for_good_have_another_rate():
    verdict = verdict_of(lost(since(8, scaled(80))))
    assert verdict.cause_class is not CauseClass.STATE


# ----------------------------------------------------------------------- rounded


def rounding(share):
    """Weights that differ by a share of themselves from step 8 on."""
    moved = {name: values.copy() for name, values in initial_weights().items()}
    for step in (1, 2, 4):
        for name in MODEL:
            moved[name] += LR * other(name, step, "update")

    def change(step, name, x):
        size = np.linalg.norm(moved[name]) / np.sqrt(x.size)
        return x + share(name) * size / LR * other(name, step, "rounded")

    return at(8, change)


def test_weights_rounded_to_bf16_are_recognised():
    verdict = verdict_of(lost(rounding(lambda _: 1e-3)))
    assert verdict.cause_class is CauseClass.STATE
    assert "weights are rounded between steps 4 and 8" in verdict.cause
    assert "export_dtype" in verdict.look_at


def test_weights_that_differ_by_unlike_shares_are_not_rounded():
    verdict = verdict_of(lost(rounding(lambda name: 4e-3 if "layers" in name else 1e-4)))
    assert "rounded" not in verdict.cause


# ------------------------------------------------------------------------ a spike


def test_a_step_that_is_off_by_far_is_a_glitch_with_its_aftermath():
    test = broken(gradient=following(0.05), noise=TAUGHT)
    test = changed(test, lambda s, x: x * (1 + 1e-3 * (s > 7) * (1 + s % 3)), *BOTH_LOSSES)
    test = changed(test, lambda s, x: x * (1.3 if s == 7 else 1 + 0.02 * (s > 7)), *BOTH_NORMS)
    verdict = verdict_of(test)
    assert verdict.cause_class is CauseClass.GLITCH
    assert "1.3 times the control's at step 7" in verdict.cause
    assert "what follows is off by 0.02 in the median" in verdict.cause
