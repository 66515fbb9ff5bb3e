"""Logs of MLPerf Training: evaluations over samples, amid whatever else was printed."""

import json

import pytest

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_curves


def line(key, value=None, **metadata):
    event = {"namespace": "", "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return f"0: :::MLLOG {json.dumps({**event, 'metadata': metadata})}"


def log(path, *, benchmark="llama2_70b_lora", key="eval_accuracy", status="success", more=()):
    lines = [
        "NCCL version 2.21",
        line("submission_benchmark", benchmark),
        line("global_batch_size", 8),
        *(line(key, 1.4 - 0.1 * count, samples_count=384 * count) for count in range(1, 5)),
        *more,
        *([line("run_stop", None, status=status)] if status else []),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_evaluations_are_a_curve_over_samples(tmp_path):
    read = read_curves(log(tmp_path / "result_0.txt"))
    assert read.steps.tolist() == [384, 768, 1152, 1536]
    assert read.signals["loss"].values.tolist() == pytest.approx([1.3, 1.2, 1.1, 1.0])
    assert read.complete


@pytest.mark.parametrize("status", ["aborted", None])
def test_a_run_without_success_is_not_complete(tmp_path, status):
    read = read_curves(log(tmp_path / "result_0.txt", status=status))
    assert not read.complete
    assert (status or "no run_stop") in read.problems[0]


def test_an_accuracy_is_no_loss_unless_somebody_says_so(tmp_path):
    path = log(tmp_path / "result_0.txt", benchmark="resnet")
    with pytest.raises(EvidenceError, match="--columns loss=eval_accuracy"):
        read_curves(path)
    assert read_curves(path, {"loss": "eval_accuracy"}).steps.size == 4
    errors = log(tmp_path / "result_1.txt", benchmark="rnnt", key="eval_error")
    assert read_curves(errors).steps.size == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (":::MLLOG {", "txt:8: not JSON"),
        (":::MLLOG []", "txt:8: no object with a key"),
        (line("eval_accuracy", 0.9), "txt:8: eval_accuracy without samples_count"),
        (line("eval_accuracy", 0.9, epoch_num=0.5), "0.5 epochs"),
        (line("eval_accuracy", "low", samples_count=9999), "which is not a number"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, more, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(log(tmp_path / "result_0.txt", more=[more]))


def test_a_log_without_evaluations_is_no_curve(tmp_path):
    with pytest.raises(EvidenceError, match="has no evaluation"):
        read_curves(log(tmp_path / "result_0.txt", key="train_loss"))
