"""MLPerf's tables of reference convergence points, and when a logged run reached its target."""

import json
import math

import pytest

from harness.errors import EvidenceError
from harness.readers import read_convergence, read_reference_points


def point(size, lengths=(5, 6, 7), key="Epochs to converge", benchmark="llama31_8b"):
    return {"Benchmark": benchmark, "BS": size, key: list(lengths), "Hyperparams": {}}


def table(path, **points):
    path.write_text(json.dumps(points))
    return path


def test_points_come_by_batch_size_in_either_unit(tmp_path):
    path = table(tmp_path / "rcps.json", b=point(32), a=point(16, key="samples to converge"))
    points = read_reference_points(path)
    assert [(each.name, each.batch_size, each.lengths) for each in points] == [
        ("a", 16, (5.0, 6.0, 7.0)),
        ("b", 32, (5.0, 6.0, 7.0)),
    ]


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({}, "no object of reference convergence points"),
        ({"a": 3}, r"rcps.json: a: a int, where a point should be"),
        ({"a": point(0)}, "BS is 0"),
        ({"a": point(True)}, "BS is True"),
        ({"a": point(8, benchmark=None)}, "Benchmark is None"),
        ({"a": point(8, key="lengths")}, "no list of positive numbers"),
        ({"a": point(8, lengths=(1, -1, 2))}, "no list of positive numbers"),
        ({"a": point(8, lengths=(1, math.nan, 2))}, "no list of positive numbers"),
        ({"a": point(8), "b": point(8)}, "several points of global batch size 8"),
        ({"a": point(8), "b": point(9, benchmark="bert")}, "several benchmarks"),
    ],
)
def test_what_is_no_table_is_an_error_with_the_point(tmp_path, points, said):
    with pytest.raises(EvidenceError, match=said):
        read_reference_points(table(tmp_path / "rcps.json", **points))


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
    epochs = event("eval_accuracy", 3.1, epoch_num=2.12345)
    assert (
        read_convergence(log(tmp_path / "b.txt", epochs, SUCCESS, benchmark="bert")).length == 2.123
    )


def test_lengths_are_counted_as_the_benchmark_s_points_are(tmp_path):
    """A log may have both; and a loss is no evaluation to MLPerf's checker."""
    both = event("eval_accuracy", 3.1, epoch_num=0.2357, samples_count=942_800_000)
    loss = event("eval_loss", 3.0, epoch_num=9.5, samples_count=999_999_999)
    for benchmark, length in (
        ("dlrm_dcnv2", 0.236),
        ("llama31_8b", 942_800_000.0),
        ("made_up", 942_800_000.0),
    ):
        path = log(tmp_path / f"{benchmark}.txt", both, loss, SUCCESS, benchmark=benchmark)
        assert read_convergence(path).length == length
    epochs = event("eval_accuracy", 3.1, epoch_num=2.0)
    with pytest.raises(EvidenceError, match=r"eval_accuracy without samples_count$"):
        read_convergence(log(tmp_path / "a.txt", epochs, SUCCESS))
    with pytest.raises(EvidenceError, match=r"where FID and CLIP first pass, which is not read"):
        read_convergence(log(tmp_path / "s.txt", both, SUCCESS, benchmark="stable_diffusion"))


@pytest.mark.parametrize("end", [(), (event("run_stop", status="aborted"),)])
def test_a_run_without_success_never_is(tmp_path, end):
    path = log(tmp_path / "a.txt", event("eval_accuracy", 3.3, samples_count=512), *end)
    assert read_convergence(path).length == math.inf


@pytest.mark.parametrize(
    ("events", "more", "said"),
    [
        ((SUCCESS,), {}, "success without an evaluation"),
        ((event("eval_accuracy", 3.0), SUCCESS), {}, "without samples_count"),
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
