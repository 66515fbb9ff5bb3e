"""Step changes: found at the right night, and none in noise, odd nights or slow series."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converge_harness.history.trend import FEWEST, find_steps

NOISE = {
    "normal": lambda chance, count: chance.standard_normal(count),
    "two-sided exponential": lambda chance, count: chance.laplace(size=count),
    "heavy tails": lambda chance, count: chance.standard_t(3, size=count),
    "largest of many differences": lambda chance, count: np.log10(
        np.abs(chance.standard_normal((count, 20))).max(axis=1)
    ),
}


@pytest.mark.parametrize("kind", NOISE)
@pytest.mark.parametrize("count", [8, 30, 365])
def test_noise_has_no_steps(kind, count):
    chance = np.random.default_rng(20260301)
    series = 200
    wrong = sum(bool(find_steps(0.3 * NOISE[kind](chance, count))) for _ in range(series))
    assert wrong <= series * 0.015  # the seed is fixed: this is a measurement


@pytest.mark.parametrize("nights_after", [2, 3, 30])
def test_a_large_step_is_found_at_its_night_from_the_second_one_on(nights_after):
    chance = np.random.default_rng(3)
    found = []
    for _ in range(100):
        levels = np.concatenate([np.full(40, -7.0), np.full(nights_after, -5.0)])
        found.append(find_steps(levels + 0.15 * chance.standard_normal(levels.size)))
    exact = [steps for steps in found if [step.at for step in steps] == [40]]
    assert len(exact) >= 98
    assert exact[0][0].before == pytest.approx(-7, abs=0.2)
    assert exact[0][0].after == pytest.approx(-5, abs=0.3)


def test_small_steps_are_found_once_there_are_enough_nights():
    chance = np.random.default_rng(4)
    levels = np.concatenate([np.full(60, -7.0), np.full(60, -6.7)])
    values = levels + 0.15 * chance.standard_normal(levels.size)
    assert [abs(step.at - 60) <= 3 for step in find_steps(values)] == [True]
    assert find_steps(values[:61]) == ()


def test_every_step_of_several_is_found():
    chance = np.random.default_rng(5)
    levels = np.repeat([-7.0, -5.0, -6.0, -7.0], 25)
    steps = find_steps(levels + 0.1 * chance.standard_normal(levels.size))
    assert [step.at for step in steps] == [25, 50, 75]


@given(
    count=st.integers(FEWEST, 120),
    where=st.floats(0, 1, exclude_max=True),
    height=st.floats(-12, 12),
    seed=st.integers(0, 2**32 - 1),
)
@settings(derandomize=True)
def test_one_odd_night_is_never_a_step(count, where, height, seed):
    chance = np.random.default_rng(seed)
    values = -7 + 0.02 * chance.uniform(-1, 1, size=count)
    values[int(where * count)] += height
    assert find_steps(values) == ()


def test_nights_that_agree_bit_for_bit_have_a_step_where_they_stop_to():
    values = np.concatenate([np.full(10, -7.0), np.full(2, -6.5)])
    assert [step.at for step in find_steps(values)] == [10]
    assert find_steps(np.concatenate([np.full(50, -7.0), np.full(50, -6.95)])) == ()


def test_too_few_nights_say_nothing():
    assert find_steps(np.array([-7.0, -7.0, -1.0, -1.0])) == ()
    assert find_steps(np.array([])) == ()


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        find_steps(np.array([-7.0, np.nan, -7.0, -7.0, -7.0]))
