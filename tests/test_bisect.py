"""The search for the first of a line of revisions that behaves as the newest."""

import math

from hypothesis import given
from hypothesis import strategies as st

from converge_harness.bisect import Suspects, search


def always(_tried):
    return True


def run(length, first, skipped=(), may_go_on=always):
    """The result, and the revisions that were tried."""
    tried = []

    def as_newest(number):
        tried.append(number)
        return None if number in skipped else number >= first

    told = []
    found = search(Suspects(0, length - 1), as_newest, may_go_on, told.append)
    assert not told or told[-1] == found
    return found, tried


lines = st.integers(2, 400).flatmap(
    lambda length: st.tuples(
        st.just(length),
        st.integers(1, length - 1),
        st.frozensets(st.integers(1, length - 1).filter(lambda n: n < length - 1), max_size=30)
        if length > 2
        else st.just(frozenset()),
    )
)


@given(lines)
def test_the_first_one_is_among_the_suspects_and_the_others_are_skipped(drawn):
    length, first, skipped = drawn
    found, tried = run(length, first, skipped)
    assert first in found.suspects
    # Nothing is left to try: all suspects but the newest of them were skipped.
    assert set(found.suspects) - {found.until} <= skipped
    assert len(tried) == len(set(tried))
    assert found.until == length - 1 or found.until not in skipped


@given(st.integers(2, 5000).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_without_skips_it_takes_as_many_trials_as_a_binary_search(drawn):
    length, first = drawn
    found, tried = run(length, first)
    assert list(found.suspects) == [first]
    assert len(tried) <= Suspects(0, length - 1).trials_left == math.ceil(math.log2(length - 1))


def test_a_stretch_that_cannot_be_built_is_left_after_a_few_trials():
    broken = frozenset(range(300, 700))
    found, tried = run(1000, 120, broken)
    assert list(found.suspects) == [120]
    assert len(broken & set(tried)) <= 2


def test_a_budget_ends_it_with_what_is_known():
    found, tried = run(1000, 700, may_go_on=lambda count: count < 2)
    assert (len(tried), found.suspects) == (2, range(500, 750))
    assert found.following() is not None


def test_two_neighbours_leave_nothing_to_try():
    found, tried = run(2, 1)
    assert (list(found.suspects), tried, found.trials_left) == ([1], [], 0)
