"""What is compared of curves to be drawn: differences, ratios, and a gate on the loss alone."""

import math

import pytest

from converge_harness.judge.compare.curves import curve_differences
from converge_harness.judge.compare.loss_only import loss_only_gate
from converge_harness.model import JUDGED_SIGNALS, Evidence


def differing(test, control, first=1, control_first=1):
    runs = (("t", first, test), ("c", control_first, control))
    return curve_differences(
        *(
            Evidence(name, name, range(start, start + len(loss)), {"loss": tuple(loss)})
            for name, start, loss in runs
        )
    )["loss"]


def test_differences_use_the_common_steps_only():
    found = differing([2.0, 3.0], [9.0, 2.0, 3.3], control_first=0)
    assert found.steps.tolist() == [1, 2]
    assert found.difference.tolist() == [0.0, pytest.approx(-0.1)]
    assert found.largest == pytest.approx(0.1)
    nowhere = differing([2.0], [2.0], first=7)
    assert (nowhere.steps.size, nowhere.largest) == (0, None)


def test_a_difference_tells_above_from_below():
    found = differing([1.0, 2.0, 2.0], [2.0, 1.0, 2.0])
    assert found.difference.tolist() == [-1.0, 1.0, 0.0]


def test_a_value_that_is_not_finite_never_agrees():
    found = differing([math.nan, math.inf, 1.0], [math.nan, 1.0, 1.0])
    assert found.difference.tolist() == [math.inf, math.inf, 0.0]
    assert found.largest == math.inf


def test_a_ratio_to_a_control_of_zero_is_not_finite():
    ratio = differing([1.0, 1.0], [0.0, 2.0]).ratio
    assert not math.isfinite(ratio[0])
    assert ratio[1] == 0.5


def test_every_judged_signal_is_there_though_neither_run_left_it():
    silent = Evidence("t", "t", (1, 2), {})
    found = curve_differences(silent, silent)
    assert tuple(found) == JUDGED_SIGNALS
    assert not any(each.steps.size for each in found.values())


@pytest.mark.parametrize(
    ("control", "passes"), [((1.0, 1.009), True), ((1.0, 1.02), False), ((math.inf, 1.0), False)]
)
def test_the_loss_only_gate_allows_one_percent(control, passes):
    assert loss_only_gate(differing([1.0, 1.0], control)).passes is passes


def test_no_common_step_no_gate():
    assert loss_only_gate(differing([1.0], [1.0], first=7)) is None
