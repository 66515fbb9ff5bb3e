"""Submissions to MLPerf Training: its published rule, and our question beside it."""

import math
from dataclasses import replace

import pytest

from converge_harness.judge import RcpInputs, judge_submission
from converge_harness.model import Convergence, Judgement, Outcome, Rcp

LENGTHS = {
    8: (1100, 1110, 1120, 1090, 1100, 1105, 1095, 1100),
    16: (1000, 1010, 1020, 990, 1000, 1030, 980, 1000),
    32: (1200, 1220, 1240, 1180, 1200, 1260, 1210, 1190),
    64: (1300, 1310, 1320, 1290, 1300, 1330, 1280, 1300),
    128: (2000, 2040, 2080, 1960, 2000, 2100, 1990, 2010),
}

OF_405B = {
    16: (300_000, 310_000, 290_000, 305_000, 295_000, 300_000),
    64: (400_000, 410_000, 390_000, 420_000, 400_000, 400_000),
}


def table(lengths=LENGTHS, benchmark="retinanet"):
    return tuple(
        Rcp(f"ref_{size}", benchmark, size, tuple(map(float, each)))
        for size, each in lengths.items()
    )


POINTS = table()
FASTEST = {
    16: (1003.3333333333334, 983.3081594109534),
    24: (1053.3333333333333, 1035.6620530287423),
    32: (1103.3333333333333, 1085.6620435913403),
    64: (1303.3333333333333, 1283.308193385601),
    100: (1706.4583333333333, 1669.2213378753513),
    128: (2020.0, 1960.5580481886864),
}
"""Global batch size to the mean and the shortest mean that is allowed: what
``mlperf_logging.rcp_checker`` of mlcommons/logging 7bbf792 makes of these points for retinanet (5
runs), with its pruned points. It halves until it is within 1e-4."""
FASTEST_OF_405B = {16: 236936.062353272, 32: 271880.4149327497, 64: 331613.3712375467}
"""Likewise of ``OF_405B`` for llama31_405b (3 runs), as of ruleset 5.0.0; in samples."""


def runs(*lengths, size=16, benchmark="retinanet"):
    return tuple(
        Convergence(f"result_{number}", f"result_{number}.txt", benchmark, size, float(length))
        for number, length in enumerate(lengths)
    )


def judged(*lengths, size=16, margin=None, points=POINTS):
    submission = RcpInputs(points, runs(*lengths, size=size, benchmark=points[0].benchmark), margin)
    return judge_submission("ours", "rcps", submission)


def found(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


@pytest.mark.parametrize("size", FASTEST)
def test_the_shortest_mean_is_that_of_mlperf_s_checker(size):
    """Batch sizes 8 and 32 are pruned: slower than a larger one, and than the line beside."""
    mean, fastest = FASTEST[size]
    allowed = judged(*[fastest + 0.001] * 5, size=size)
    assert found(allowed, "rcp-not-faster").limit.value == pytest.approx(fastest, abs=2e-4)
    assert allowed.judgement is Judgement.PASS
    assert (
        f"multiplies its score by {mean / fastest:.4f}" in found(allowed, "rcp-not-faster").detail
    )
    faster = judged(*[fastest - 0.001] * 5, size=size)
    assert faster.judgement is Judgement.FAIL
    assert "faster than chance allows" in faster.cause


def test_the_shortest_and_the_longest_run_are_left_out():
    assert judged(1, 1000, 1000, 1000, 10**9).judgement is Judgement.PASS
    assert judged(1, 1, 1000, 1000, 1000).judgement is Judgement.FAIL


def test_one_run_may_miss_its_target_and_two_may_not():
    assert judged(1000, 1000, 1000, 1000, math.inf).judgement is Judgement.PASS
    verdict = judged(1000, 1000, 1000, math.inf, math.inf)
    assert verdict.judgement is Judgement.FAIL
    assert "2 of 5 runs miss the target (result_3, result_4)" in verdict.cause


def test_a_missed_target_counts_as_1e9_which_runs_of_gpt3_exceed():
    """So it is their shortest, as in mlperf_logging rcp_checker."""
    lengths = {1536: [1.15e9, 1.16e9, 1.17e9, 1.16e9, 1.15e9, 1.17e9]}
    points = table(lengths, "gpt3")
    for one, judgement in ((1.16e9, Judgement.PASS), (1.1e9, Judgement.FAIL)):
        verdict = judged(one, 1.16e9, math.inf, size=1536, points=points)
        assert verdict.judgement is judgement


def test_below_all_points_it_may_only_be_slower_than_the_smallest():
    assert judged(1000, 1010, 1000, 1000, 1000, size=8).judgement is Judgement.PASS
    verdict = judged(900, 900, 900, 900, 900, size=8)
    assert verdict.judgement is Judgement.INVALID
    assert "needs its own" in verdict.cause


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (runs(*[1000] * 5, size=256), "no point for global batch size 256"),
        (runs(*[1000] * 4), "the submission has 4 runs: MLPerf demands 5 of retinanet"),
        ((*runs(1000, 1000), *runs(1000, size=32)), "global batch size of result_0 is 32"),
        (
            tuple(replace(each, benchmark="bert") for each in runs(1000, 1000, 1000)),
            "result_0 is of bert, the table of retinanet",
        ),
    ],
)
def test_what_the_table_says_nothing_of_is_invalid(given, said):
    verdict = judge_submission("ours", "rcps", RcpInputs(POINTS, given, 0.05))
    assert verdict.judgement is Judgement.INVALID
    assert said in verdict.cause
    assert [check.name for check in verdict.checks] == ["submission-comparable"]


@pytest.mark.parametrize(
    ("lengths", "judgement"),
    [
        ((1000, 1010, 990, 1005, 1000), Judgement.PASS),
        ((1200, 1210, 1190, 1205, 1200), Judgement.FAIL),
        ((1040, 1060, 1045, 1055, 1050), Judgement.INCONCLUSIVE),
        ((1000, 1010, 990, 1005, math.inf), Judgement.INCONCLUSIVE),
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
    assert judged(*[1000] * 5, points=points).judgement is Judgement.PASS
    assert judged(*[999] * 5, points=points).judgement is Judgement.FAIL


def test_fewer_runs_than_mlperf_demands_are_invalid_however_long():
    """Their number would widen what chance allows: 985 of 3 runs passed, and 988.9 is the limit."""
    points = table(benchmark="llama31_8b")
    for length in (900, 985, 2000):
        verdict = judged(*[length] * 3, points=points)
        assert verdict.judgement is Judgement.INVALID
        assert "has 3 runs: MLPerf demands 10 of llama31_8b" in verdict.cause
    assert judged(*[985] * 10, points=points).judgement is Judgement.FAIL
    assert judged(*[989] * 10, points=points).judgement is Judgement.PASS


@pytest.mark.parametrize("size", [16, 24])
def test_more_runs_than_mlperf_demands_leave_the_limit_as_it_is(size):
    """Of a point of the table, and of one that lies between two."""
    verdict = judged(*[1100] * 12, size=size)
    assert found(verdict, "rcp-not-faster").limit.value == pytest.approx(FASTEST[size][1], abs=2e-4)


def test_a_benchmark_of_an_unknown_number_of_runs_is_invalid():
    verdict = judged(*[1000] * 10, points=table(benchmark="llama9"))
    assert verdict.judgement is Judgement.INVALID
    assert "how many runs MLPerf demands of llama9 is not known" in verdict.cause


@pytest.mark.parametrize("size", FASTEST_OF_405B)
def test_llama31_405b_may_be_46_080_samples_sooner(size):
    points, fastest = table(OF_405B, "llama31_405b"), FASTEST_OF_405B[size]
    allowed = judged(*[fastest + 0.001] * 3, size=size, points=points)
    assert allowed.judgement is Judgement.PASS
    assert found(allowed, "rcp-not-faster").limit.value == pytest.approx(fastest, abs=2e-4)
    assert judged(*[fastest - 1] * 3, size=size, points=points).judgement is Judgement.FAIL


def test_llama31_405b_of_equal_lengths_may_be_46_080_samples_sooner_too():
    points = table({16: [300_000] * 6}, "llama31_405b")
    assert judged(*[253_920] * 3, points=points).judgement is Judgement.PASS
    assert judged(*[253_919] * 3, points=points).judgement is Judgement.FAIL
