"""Submissions to MLPerf Training: its published rule, and our question beside it."""

import math
from dataclasses import replace

import pytest

from harness.judge import Submission, judge_submission
from harness.model import Convergence, Judgement, Outcome, ReferencePoint

BENCHMARK = "made_up"
"""Of a benchmark that is not known submissions have half the runs of a reference."""
LENGTHS = {
    8: (1100, 1110, 1120, 1090, 1100, 1105, 1095, 1100),
    16: (1000, 1010, 1020, 990, 1000, 1030, 980, 1000),
    32: (1200, 1220, 1240, 1180, 1200, 1260, 1210, 1190),
    64: (1300, 1310, 1320, 1290, 1300, 1330, 1280, 1300),
    128: (2000, 2040, 2080, 1960, 2000, 2100, 1990, 2010),
}
POINTS = tuple(
    ReferencePoint(f"ref_{size}", BENCHMARK, size, tuple(map(float, lengths)))
    for size, lengths in LENGTHS.items()
)
FASTEST = {
    16: (1003.3333333333334, 979.6170980731647),
    24: (1053.3333333333333, 1031.3584911823273),
    32: (1103.3333333333333, 1081.358526845773),
    64: (1303.3333333333333, 1279.6170815825462),
    100: (1706.4583333333333, 1660.152875094985),
    128: (2020.0, 1949.6015825867653),
}
"""Global batch size to the mean and the shortest mean that is allowed: what
``mlperf_logging.rcp_checker`` of mlcommons/logging 7bbf792 makes of these points for 4 runs, with
its pruned points. It halves until it is within 1e-4."""


def runs(*lengths, size=16):
    return tuple(
        Convergence(f"result_{number}", f"result_{number}.txt", BENCHMARK, size, float(length))
        for number, length in enumerate(lengths)
    )


def judged(*lengths, size=16, margin=None, points=POINTS):
    submission = Submission(points, runs(*lengths, size=size), margin)
    return judge_submission("ours", "rcps", submission)


def found(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


@pytest.mark.parametrize("size", FASTEST)
def test_the_shortest_mean_is_that_of_mlperf_s_checker(size):
    """Batch sizes 8 and 32 are pruned: slower than a larger one, and than the line beside."""
    mean, fastest = FASTEST[size]
    allowed = judged(*[fastest + 0.001] * 4, size=size)
    assert found(allowed, "rcp-not-faster").limit.value == pytest.approx(fastest, abs=2e-4)
    assert allowed.judgement is Judgement.PASS
    assert (
        f"multiplies its score by {mean / fastest:.4f}" in found(allowed, "rcp-not-faster").detail
    )
    faster = judged(*[fastest - 0.001] * 4, size=size)
    assert faster.judgement is Judgement.FAIL
    assert "faster than chance allows" in faster.cause


def test_the_shortest_and_the_longest_run_are_left_out():
    assert judged(1, 1000, 1000, 10**9).judgement is Judgement.PASS
    assert judged(1, 1, 1000, 1000).judgement is Judgement.FAIL


def test_one_run_may_miss_its_target_and_two_may_not():
    assert judged(1000, 1000, 1000, math.inf).judgement is Judgement.PASS
    verdict = judged(1000, 1000, math.inf, math.inf)
    assert verdict.judgement is Judgement.FAIL
    assert "2 of 4 runs miss the target (result_2, result_3)" in verdict.cause


def test_below_all_points_it_may_only_be_slower_than_the_smallest():
    assert judged(1000, 1010, 1000, 1000, size=8).judgement is Judgement.PASS
    verdict = judged(900, 900, 900, 900, size=8)
    assert verdict.judgement is Judgement.INVALID
    assert "needs its own" in verdict.cause


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (runs(1000, 1000, 1000, 1000, size=256), "no point for global batch size 256"),
        (runs(1000, 1000), "the submission has 2 runs: a mean needs at least 3"),
        (runs(1000, 1000, 1000), "has 3 runs, and MLPerf asks for 4 of made_up"),
        (runs(*[1.5] * 4), "one side counts samples, and the other epochs"),
        ((*runs(1000, 1000), *runs(1000, size=32)), "global batch size of result_0 is 32"),
        (
            tuple(replace(each, benchmark="bert") for each in runs(1000, 1000, 1000)),
            "result_0 is of bert, the table of made_up",
        ),
    ],
)
def test_what_the_table_says_nothing_of_is_invalid(given, said):
    verdict = judge_submission("ours", "rcps", Submission(POINTS, given, 0.05))
    assert verdict.judgement is Judgement.INVALID
    assert said in verdict.cause
    assert [check.name for check in verdict.checks] == ["submission-comparable"]


@pytest.mark.parametrize(
    ("lengths", "judgement"),
    [
        ((1000, 1010, 990, 1005), Judgement.PASS),
        ((1200, 1210, 1190, 1205), Judgement.FAIL),
        ((1040, 1060, 1045, 1055), Judgement.INCONCLUSIVE),
        ((1000, 1010, 990, math.inf), Judgement.INCONCLUSIVE),
    ],
)
def test_with_a_margin_it_must_not_be_later_either(lengths, judgement):
    """MLPerf lets all of them pass: they are not faster."""
    assert judged(*lengths).judgement is Judgement.PASS
    assert judged(*lengths).not_asked == ("rcp-no-later",)
    verdict = judged(*lengths, margin=0.05)
    assert verdict.judgement is judgement
    assert found(verdict, "rcp-not-faster").outcome is Outcome.PASS
    assert verdict.not_asked == ()


def test_equal_lengths_allow_no_shorter_mean():
    points = (replace(POINTS[1], lengths=(1000.0,) * 8),)
    assert judged(1000, 1000, 1000, 1000, points=points).judgement is Judgement.PASS
    assert judged(999, 999, 999, 999, points=points).judgement is Judgement.FAIL


def of(benchmark, count, length):
    """A submission of so many runs to a benchmark with one point of 20 runs."""
    reference = tuple(float(1000 + 10 * (number % 5)) for number in range(20))
    points = (ReferencePoint("ref", benchmark, 16, reference),)
    given = tuple(replace(each, benchmark=benchmark) for each in runs(*[length] * count))
    return judge_submission("ours", "rcps", Submission(points, given, None))


def test_known_benchmarks_ask_for_their_number_of_runs():
    few = of("llama31_8b", 3, 1020)
    assert few.judgement is Judgement.INVALID
    assert "MLPerf asks for 10 of llama31_8b" in few.cause
    # Twice as many submitted runs do not narrow the limit, either.
    limits = {found(of("llama31_8b", count, 1020), "rcp-not-faster").limit for count in (10, 20)}
    assert len(limits) == 1
    assert of("gpt3", 3, 1020).judgement is Judgement.PASS


def test_one_evaluation_of_llama31_405b_is_no_speed():
    reference = tuple(290_000.0 + 1000 * (number % 3) for number in range(6))
    points = (ReferencePoint("ref", "llama31_405b", 16, reference),)

    def judgement(length):
        given = tuple(
            replace(each, benchmark="llama31_405b") for each in runs(length, length, length)
        )
        return judge_submission("ours", "rcps", Submission(points, given, None)).judgement

    assert judgement(245_000) is Judgement.PASS
    assert judgement(240_000) is Judgement.FAIL
