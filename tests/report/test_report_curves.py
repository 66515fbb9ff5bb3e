import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.model import Evidence
from converge_harness.report.renderers.downsample import corners, downsample
from converge_harness.report.renderers.figures import figure
from converge_harness.report.renderers.scales import SignedLog, ratio_needs_log, ratio_range
from converge_harness.report.view.curves import Curve, signal_curve


def curve(*values, first=1):
    return Curve(tuple(range(first, first + len(values))), values)


def test_missing_values_become_gaps_and_a_missing_signal_an_empty_curve():
    evidence = Evidence("a", "a", (1, 2, 3), {"loss": (1.0, None), "lr": (None, None, None)})
    loss = signal_curve(evidence, "loss")
    assert tuple(loss.steps) == (1, 2, 3)
    assert loss.values[0] == 1.0
    assert all(map(math.isnan, loss.values[1:]))
    assert not signal_curve(evidence, "lr")
    assert not signal_curve(evidence, "grad_norm")


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400),
    st.integers(5, 60),
)
def test_downsampling_keeps_ends_extremes_and_gaps(values, points):
    original = curve(*values)
    drawn = downsample(original, points)
    assert len(drawn) <= points or drawn == original
    assert drawn.steps[0] == original.steps[0]
    assert drawn.steps[-1] == original.steps[-1]
    finite = [value for value in values if not math.isnan(value)]
    if finite:
        kept = [value for value in drawn.values if not math.isnan(value)]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert any(map(math.isnan, drawn.values)) == any(map(math.isnan, values))


def test_downsampling_to_no_bucket_is_refused():
    with pytest.raises(ValueError, match="at least 5"):
        downsample(curve(1.0), 4)


def test_corners_leave_straight_stretches_out():
    assert corners(curve(1.0, 1.0, 1.0, 2.0, 2.0)) == Curve((1, 3, 4, 5), (1.0, 1.0, 2.0, 2.0))


def test_a_signed_log_axis_has_zero_in_its_middle_and_both_signs_apart():
    axis = SignedLog.over([curve(0.0, 3e-8, -1e-3, math.inf)])
    assert axis.unit == pytest.approx(1e-8)
    assert axis.place(curve(0.0).values) == [0.0]
    up, down = axis.place(curve(3e-8, -3e-8).values)
    assert up == -down > 0.5
    labels = "-1e-3 -1e-4 -1e-5 -1e-6 -1e-7 0 1e-7 1e-6 1e-5 1e-4 1e-3"
    assert " ".join(axis.ticks.values()) == labels
    assert axis.span[1] > axis.place(curve(1e-3).values)[0]


def test_ticks_thin_out_over_a_long_range():
    assert len(SignedLog.over([curve(1e-30, 1e3)]).ticks) <= 13
    assert SignedLog.over([Curve(), curve(0.0)]).ticks[0.0] == "0"


@pytest.mark.parametrize(
    ("value", "log"), [(1.2, False), (0.5, True), (868.0, True), (math.nan, False)]
)
def test_only_far_ratios_need_a_log_axis(value, log):
    assert ratio_needs_log([curve(value)]) is log


@pytest.mark.parametrize(
    ("values", "span"),
    [
        ((1.0, 1.0), (1 - 1e-6, 1 + 1e-6)),
        ((1 + 2e-7, math.nan), (1 - 1e-6, 1 + 1e-6)),
        ((1.0, 1 - 2e-5), (1 - 2.2e-5, 1 + 2.2e-5)),
        ((1.0, 1.01), None),
        ((math.inf,), None),
    ],
)
def test_ratios_that_are_nearly_equal_get_a_range_that_shows_by_how_much(values, span):
    assert ratio_range([Curve(), curve(*values)]) == (span and pytest.approx(span, abs=1e-12))


def test_ticks_of_such_a_range_have_the_digits_that_tell_them_apart():
    drawn = figure([], "test / control", span=(1 - 1e-6, 1 + 1e-6))
    assert (drawn["span"], drawn["digits"]) == ([1 - 1e-6, 1 + 1e-6], 7)
    assert figure([], "loss")["span"] is None
