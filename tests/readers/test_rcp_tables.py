"""MLPerf's tables of reference convergence points, and when a logged run reached its target."""

import json
import math

import pytest

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_convergence, read_rcps


def point(size, lengths=(5, 6, 7), key="Epochs to converge", benchmark="llama31_8b"):
    return {"Benchmark": benchmark, "BS": size, key: list(lengths), "Hyperparams": {}}


def table(path, **points):
    path.write_text(json.dumps(points))
    return path


def test_points_come_by_batch_size_in_either_unit(tmp_path):
    path = table(tmp_path / "rcps.json", b=point(32), a=point(16, key="samples to converge"))
    points = read_rcps(path)
    assert [(each.name, each.batch_size, each.lengths) for each in points] == [
        ("a", 16, (5.0, 6.0, 7.0)),
        ("b", 32, (5.0, 6.0, 7.0)),
    ]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({}, "not an object of reference convergence points"),
        ({"a": 3}, r"rcps.json: a: a int, not a point"),
        ({"a": point(0)}, "BS is 0"),
        ({"a": point(True)}, "BS is True"),
        ({"a": point(8, benchmark=None)}, "Benchmark is None"),
        ({"a": point(8, key="lengths")}, "not a list of positive numbers"),
        ({"a": point(8, lengths=(1, -1, 2))}, "not a list of positive numbers"),
        ({"a": point(8, lengths=(1, math.nan, 2))}, "not a list of positive numbers"),
        ({"a": point(8), "b": point(8)}, "several points of global batch size 8"),
        ({"a": point(8), "b": point(9, benchmark="bert")}, "several benchmarks"),
    ],
)
def test_what_is_no_table_is_an_error_with_the_point(tmp_path, points, said):
    with pytest.raises(EvidenceError, match=said):
        read_rcps(table(tmp_path / "rcps.json", **points))


def event(key, value=None, **metadata):
    return ":::MLLOG " + json.dumps({"key": key, "value": value, "metadata": metadata})


def log(path, *events, benchmark="llama31_8b", size=16):
    head = [event("submission_benchmark", benchmark), event("global_batch_size", size)]
    path.write_text("\n".join([*head, *events]) + "\n")
    return path


SUCCESS = event("run_stop", status="success")


def test_a_run_is_there_at_its_last_evaluation(tmp_path):
    evaluations = [event("eval_accuracy", 3.3, samples_count=count) for count in (512, 1024)]
    later = event("eval_accuracy", 3.1, samples_count=2048)
    read = read_convergence(log(tmp_path / "result_0.txt", *evaluations, SUCCESS, later))
    assert (read.name, read.batch_size, read.length) == ("result_0", 16, 1024.0)


@pytest.mark.parametrize(
    ("benchmark", "length"),
    [
        ("dlrm_dcnv2", 0.236),
        ("gpt3", 0.236),
        ("llama31_8b", 942_800_000.0),
        ("flux1", 942_800_000.0),
    ],
)
def test_a_length_is_in_what_the_benchmark_counts(tmp_path, benchmark, length):
    """Though the log has both, and its other number is the first."""
    both = event("eval_accuracy", 0.8, samples_count=942_800_000, epoch_num=0.2357)
    path = log(tmp_path / "a.txt", both, SUCCESS, benchmark=benchmark)
    assert read_convergence(path).length == length


def test_an_eval_loss_is_no_evaluation_of_mlperf_s(tmp_path):
    loss = event("eval_loss", 3.1, samples_count=2048)
    path = log(tmp_path / "a.txt", event("eval_accuracy", 3.3, samples_count=1024), loss, SUCCESS)
    assert read_convergence(path).length == 1024.0


def diffusion(path, *scores):
    """A log with (samples, metric, value) of every evaluation."""
    keys = {"FID": "eval_error", "CLIP": "eval_accuracy"}
    evaluations = (
        event(keys[metric], value, samples_count=count, metric=metric)
        for count, metric, value in scores
    )
    return log(path, *evaluations, SUCCESS, benchmark="stable_diffusion")


def test_stable_diffusion_is_there_where_both_metrics_first_are(tmp_path):
    """The two are logged in any order, and it goes on after its target."""
    path = diffusion(
        tmp_path / "a.txt",
        (0, "FID", 300.0),
        (512, "CLIP", 0.15),
        (512, "FID", 90.5),
        (1536, "FID", 70.0),
        (1024, "FID", 90.0),
        (1024, "CLIP", 0.15),
        (2048, "FID", 80.0),
        (1536, "CLIP", 0.2),
        (2048, "CLIP", 0.14),
    )
    assert read_convergence(path).length == 1024.0


@pytest.mark.parametrize(
    "scores",
    [
        [(512, "FID", 91.0), (512, "CLIP", 0.2)],
        [(512, "FID", 80.0), (512, "CLIP", 0.1)],
        [(512, "FID", 80.0), (1024, "CLIP", 0.2)],
        [(512, "FID", None), (512, "CLIP", 0.2)],
    ],
)
def test_stable_diffusion_without_both_metrics_at_their_targets_is_an_error(tmp_path, scores):
    with pytest.raises(EvidenceError, match="has both a FID of at most 90 and a CLIP"):
        read_convergence(diffusion(tmp_path / "a.txt", *scores))


@pytest.mark.parametrize("end", [(), (event("run_stop", status="aborted"),)])
def test_a_run_without_success_never_is(tmp_path, end):
    path = log(tmp_path / "a.txt", event("eval_accuracy", 3.3, samples_count=512), *end)
    assert read_convergence(path).length == math.inf


@pytest.mark.parametrize(
    ("events", "more", "said"),
    [
        ((SUCCESS,), {}, "success without an evaluation"),
        ((event("eval_accuracy", 3.0), SUCCESS), {}, "without samples_count, in which MLPerf"),
        (
            (event("eval_accuracy", 0.8, samples_count=512), SUCCESS),
            {"benchmark": "dlrm_dcnv2"},
            "without epoch_num, in which MLPerf counts dlrm_dcnv2",
        ),
        ((event("eval_accuracy", 3.0, samples_count="many"), SUCCESS), {}, "without samples_count"),
        ((SUCCESS,), {"size": None}, "global_batch_size is None"),
        ((SUCCESS,), {"benchmark": None}, "no submission_benchmark"),
    ],
)
def test_a_log_that_does_not_say_is_an_error(tmp_path, events, more, said):
    with pytest.raises(EvidenceError, match=said):
        read_convergence(log(tmp_path / "a.txt", *events, **more))
    (tmp_path / "b.txt").write_text("1 2.0\n")
    with pytest.raises(EvidenceError, match="no line of MLPerf's logger"):
        read_convergence(tmp_path / "b.txt")
