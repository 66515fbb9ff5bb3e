"""At which steps evidence is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.model import CADENCE_OFF, POWERS_OF_TWO
from converge_harness.plan.make import sample_steps


@pytest.mark.parametrize(
    ("cadence", "steps", "sampled"),
    [
        (POWERS_OF_TWO, 20, (0, 1, 2, 4, 8, 16)),
        (POWERS_OF_TWO, 16, (0, 1, 2, 4, 8, 16)),
        (POWERS_OF_TWO, 1, (0, 1)),
        (CADENCE_OFF, 20, ()),
        (1, 3, (0, 1, 2, 3)),
        (5, 16, (0, 1, 2, 5, 10, 15)),
        (50, 16, (0, 1, 2)),
        ((0, 3, 7), 16, (0, 3, 7)),
    ],
)
def test_sampled_steps(cadence, steps, sampled):
    assert sample_steps(cadence, steps) == sampled


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="'never' is not a cadence"):
        sample_steps("never", 3)


@given(st.just(POWERS_OF_TWO) | st.integers(1, 100), st.integers(1, 10_000))
def test_the_first_steps_are_always_sampled_in_order_and_within_the_run(cadence, steps):
    sampled = sample_steps(cadence, steps)
    assert sampled[: min(3, steps + 1)] == tuple(range(min(3, steps + 1)))
    assert list(sampled) == sorted(set(sampled))
    assert sampled[-1] <= steps


def test_a_list_always_has_the_initial_weights_too():
    assert sample_steps((5, 1), 4) == (0, 1)
