import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converge_harness.report.sanitize import plain, plain_block
from converge_harness.report.text import (
    ABSENT,
    anchors,
    digits,
    duration,
    excess,
    glued,
    percent,
    tail,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ABSENT),
        (0.0, "0"),
        (20.0, "20"),
        (1.2e-7, "1.2e-7"),
        (0.5, "0.5"),
        (1e12, "1e12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value, expected):
    assert digits(value) == expected


@pytest.mark.parametrize(
    ("measured", "limit", "expected"),
    [
        (2.57e-2, 1e-6, "25,700x"),
        (3e-6, 1e-6, "3x"),
        (math.inf, 1.0, ""),
        (1.0, 0.0, ""),
        (None, 1.0, ""),
    ],
)
def test_excess_says_something_or_nothing(measured, limit, expected):
    assert excess(measured, limit) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(None, ABSENT), (8.24, "8.2 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, "0%"), (7e-8, "<0.01%"), (0.0565, "5.65%"), (math.inf, "not finite")],
)
def test_percents_are_for_comparing_with_one_percent(fraction, expected):
    assert percent(fraction) == expected


def test_numbers_stay_with_what_they_count():
    assert glued("3 FAIL, 1 ERROR.") == "3\xa0FAIL, 1\xa0ERROR."


@given(st.text())
def test_plain_text_is_one_printable_line(text):
    result = plain(text)
    assert result.isprintable()
    assert result == plain(result)


def test_log_blocks_lose_colours_and_keep_lines():
    assert plain_block("\x1b[31mTraceback\x1b[0m\r\n  line\t2\x00\n") == "Traceback\n  line  2�"


def test_a_tail_says_what_it_left_out():
    assert tail("a\nb\nc", 2) == "… 1 earlier lines left out\nb\nc"
    assert tail("a\nb", 2) == "a\nb"


@given(st.lists(st.text(max_size=8), max_size=12))
def test_anchors_are_unique_and_harmless(names):
    fragments = anchors(names)
    assert len(set(fragments)) == len(names)
    assert all(fragment.replace("-", "").isalnum() and fragment.isascii() for fragment in fragments)
