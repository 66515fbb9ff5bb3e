"""Trends: which night was the first bad one, and what changed before it."""

from dataclasses import replace

import numpy as np
import pytest
from history_samples import LIMIT, deviation, night, nights_with_a_step, result

from converge_harness.history import Changed, History
from converge_harness.history.trend import DEFINITION, decades, trends
from converge_harness.model import Judgement


def trends_of(path, nights):
    history = History(path)
    history.append_all(nights)
    return {
        trend.series.check: trend
        for trend in trends(history.nights("nightly", "tp2"), history.series("nightly", "tp2"))
    }


def test_a_step_names_its_first_bad_night_and_what_changed(tmp_path):
    found = trends_of(tmp_path / "history.sqlite", nights_with_a_step(30, at=20))
    (step,) = found["loss-envelope"].steps
    assert step.first_after.finished.day == 21
    assert step.last_before.finished.day == 20
    assert step.first_after.verdict is Judgement.FAIL
    assert step.worse
    assert step.after / step.before == pytest.approx(100, rel=0.5)
    assert step.changed == (
        Changed("commit", f"{19:040x}", f"{20:040x}"),
        Changed("torch", "2.12.0", "2.13.0"),
    )
    assert found["grad-norm-envelope"].steps == ()


def test_a_step_that_stays_within_the_limit_is_found_too(tmp_path):
    nights = nights_with_a_step(30, at=20, factor=8.0)
    found = trends_of(tmp_path / "history.sqlite", nights)
    assert {each.results[0].verdict for each in nights} == {Judgement.PASS}
    assert [step.first_after.finished.day for step in found["loss-envelope"].steps] == [21]


def test_nights_without_a_value_are_gaps(tmp_path):
    nights = nights_with_a_step(30, at=20)
    for index in (5, 18, 19):  # crashed, or left out by --only
        crashed = replace(nights[index].results[0], verdict=Judgement.ERROR, measurements=())
        nights[index] = replace(nights[index], results=(crashed,))
    del nights[10]
    (step,) = trends_of(tmp_path / "history.sqlite", nights)["loss-envelope"].steps
    assert step.last_before.finished.day == 18
    assert step.first_after.finished.day == 21
    assert Changed("torch", "2.12.0", "2.13.0") in step.changed


def test_a_changed_experiment_file_is_reported_as_such(tmp_path):
    nights = [
        replace(each, results=(replace(each.results[0], definition="e" * 64),))
        if day >= 20
        else each
        for day, each in enumerate(nights_with_a_step(30, at=20))
    ]
    (step,) = trends_of(tmp_path / "history.sqlite", nights)["loss-envelope"].steps
    assert step.changed[0].name == DEFINITION


def test_runs_that_stop_to_agree_bit_for_bit_and_runs_that_diverge_are_steps(tmp_path):
    sizes = [0.0] * 6 + [1e-9] * 6 + [float("nan")] * 3 + [0.0] * 6
    nights = [
        night(day, result(measurements=(deviation("loss-envelope", size),)))
        for day, size in enumerate(sizes)
    ]
    steps = trends_of(tmp_path / "history.sqlite", nights)["loss-envelope"].steps
    assert [step.first_after.finished.day - 1 for step in steps] == [6, 12, 15]
    assert [step.worse for step in steps] == [True, True, False]
    assert steps[0].before == 0


def test_what_was_always_zero_or_is_no_deviation_has_no_trend(tmp_path):
    zero, seconds = deviation("loss-envelope", 0.0), deviation("recovers-in-time", 20.0, 120.0)
    one = result(measurements=(zero, replace(seconds, unit="s")))
    assert trends_of(tmp_path / "history.sqlite", [night(day, one) for day in range(9)]) == {}


def test_zero_and_what_is_not_finite_have_a_place_on_the_scale():
    measured = np.array([1e-8, 0.0, 1e-7, np.nan, np.inf])
    heights = decades(measured, np.full(5, LIMIT))
    assert heights == pytest.approx([-8, -9, -7, np.log10(LIMIT) + 1, np.log10(LIMIT) + 1])
    # Nothing but zero and NaN, without a limit: still two places.
    assert decades(np.array([0.0, np.nan]), np.array([np.nan, np.nan])).tolist() == [-1, 1]
