"""Hugging Face's trainer states and Megatron-LM's golden values."""

import json
import math

import pytest
from reader_files import file

from converge_harness.errors import EvidenceError
from converge_harness.readers import read_curves

# ------------------------------------------------------------- trainer_state.json

HISTORY = [
    {"epoch": 0.32, "grad_norm": 1.052856564, "learning_rate": 4.8e-06, "loss": 1.387, "step": 50},
    {"epoch": 0.32, "eval_loss": 1.3863019943237305, "eval_runtime": 92.0, "step": 50},
    {
        "epoch": 0.63,
        "grad_norm": 1.00612318,
        "learning_rate": 9.8e-06,
        "loss": 1.3879,
        "step": 100,
    },
    {"epoch": 0.63, "total_flos": 1e15, "train_loss": 1.38745, "train_runtime": 9.1, "step": 100},
]
STATE = {"best_metric": None, "epoch": 0.63, "global_step": 100, "log_history": HISTORY}


def trainer_state(history=HISTORY):
    return json.dumps({**STATE, "log_history": history}, indent=2)


def test_only_training_rows_of_a_trainer_state_are_read(tmp_path):
    evidence = read_curves(file(tmp_path / "my_run", "trainer_state.json", trainer_state()))
    assert evidence.name == "my_run"
    assert evidence.steps.tolist() == [50, 100]
    assert evidence.signals["loss"] == (1.387, 1.3879)
    assert evidence.signals["grad_norm"] == (1.052856564, 1.00612318)
    assert evidence.signals["lr"] == (4.8e-06, 9.8e-06)
    assert evidence.rounding == {"loss": 0.5e-4}
    assert (evidence.replayed, evidence.problems) == ((), ())


def test_a_loss_that_is_not_rounded_is_not_taken_as_such(tmp_path):
    history = [{"loss": 1.3870000012, "step": 1}]
    evidence = read_curves(file(tmp_path, "trainer_state.json", trainer_state(history)))
    assert evidence.rounding == {}


def test_nan_in_a_trainer_state_stays_nan(tmp_path):
    history = [{"loss": math.nan, "step": 1}]
    evidence = read_curves(file(tmp_path, "trainer_state.json", trainer_state(history)))
    assert math.isnan(evidence.signals["loss"][0])


def test_the_last_checkpoint_of_an_output_folder_is_read(tmp_path):
    for number in (9, 100, 50):
        file(tmp_path, f"checkpoint-{number}/trainer_state.json", trainer_state(HISTORY[:number]))
    evidence = read_curves(tmp_path)
    assert evidence.name == tmp_path.name
    assert evidence.source == str(tmp_path / "checkpoint-100" / "trainer_state.json")
    assert read_curves(tmp_path / "checkpoint-50").name == "checkpoint-50"


def test_a_folders_own_trainer_state_is_nearer_than_event_files_below(tmp_path):
    file(tmp_path, "trainer_state.json", trainer_state())
    file(tmp_path, "runs/Nov01_host/events.out.tfevents.1", b"")
    assert read_curves(tmp_path).signals["loss"] == (1.387, 1.3879)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (trainer_state()[:-40], "not JSON: "),
        ('{"log_history": {}}', "log_history: a dict, not a list"),
        ('{"log_history": []}', "has no row of values"),
        ('{"log_history": [1]}', r"log_history\[0\]: a int, not a JSON object"),
        ('{"log_history": [{"step": 1, "loss": "low"}]}', r"log_history\[0\]: loss is 'low'"),
        ('{"log_history": [{"loss": 1}, {"step": 2}]}', r"log_history\[0\]: step is None"),
        ('{"log_history": [{"step": 1, "eval_loss": 1}]}', "no loss among 'step', 'eval_loss'"),
        ('{"log_history": [{"step": 1, "step": 2}]}', "the key 'step' occurs twice"),
        ('{"global_step": 1,\n "epoch": 2}', "neither a trainer_state.json"),
        ("[1, 2]", "is not a JSON object"),
        (b'{"log_history": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_a_trainer_state_that_cannot_be_understood(tmp_path, text, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "trainer_state.json", text))


# ------------------------------------------------------------------ golden values


def metric(values, start=1, interval=5):
    return {"start_step": start, "end_step": 50, "step_interval": interval, "values": values}


def golden(**metrics):
    return json.dumps({name.replace("_", " "): value for name, value in metrics.items()})


ZEROS = {"num-zeros": metric({"1": 1696.0, "5": 1776.0})}
TIMES = {"iteration-time": metric({"1": "nan", "5": 0.10355}), "iteration_timing_avg": 0.119}


def test_golden_values_by_iteration(tmp_path):
    curves = {"lm loss": metric({"1": 10.86114, "5": 10.87296, "10": 10.83903}), **ZEROS, **TIMES}
    evidence = read_curves(file(tmp_path, "golden_values_dev.json", json.dumps(curves, indent=4)))
    assert evidence.steps.tolist() == [1, 5, 10]
    assert evidence.signals == {"loss": (10.86114, 10.87296, 10.83903)}
    assert evidence.rounding == {"loss": 5e-6}


@pytest.mark.parametrize(("start", "steps"), [(0, [1, 6, 11]), (1, [1, 6, 11]), (5, [5, 10, 15])])
def test_golden_values_as_a_list_of_every_fifth_iteration(tmp_path, start, steps):
    """Megatron-LM cut its lists from all values, of which the first (0) is iteration 1."""
    curves = {"lm loss": metric([10.83377, 10.86686, 10.89018], start), **ZEROS, **TIMES}
    evidence = read_curves(file(tmp_path, "golden_values.json", json.dumps(curves)))
    assert evidence.steps.tolist() == steps
    assert evidence.signals["loss"] == (10.83377, 10.86686, 10.89018)


def by_iteration(steps, **header):
    entry = metric({str(step): 10.0 - step / 100 for step in steps}, interval=1)
    return {"lm loss": {**entry, **header}}


CONTRADICTIONS = {
    "cut off": (by_iteration(range(1, 31)), "end_step of 'lm loss' is 50, but its last value is"),
    "begun late": (by_iteration(range(21, 51)), "start_step of 'lm loss' is 1, but its first"),
    "goes on": (by_iteration(range(1, 61)), "end_step of 'lm loss' is 50, but its last value is"),
    "thinned": (by_iteration(range(1, 51, 5), end_step=46), "step_interval of 'lm loss' is 1"),
    "a header of floats": (
        by_iteration(range(1, 31), end_step=50.0),
        "end_step of 'lm loss' is 50.0",
    ),
    "a header of text": (
        by_iteration(range(1, 51), step_interval="1"),
        "step_interval of 'lm loss'",
    ),
    "no interval": (
        by_iteration(range(1, 31), step_interval=0),
        "is 0, which is not a number of steps",
    ),
    "begun before its start": (
        by_iteration(range(1, 51), start_step=40),
        "start_step of 'lm loss'",
    ),
    "a list cut off": (
        {"lm loss": metric([10.0 - step / 100 for step in range(6)], start=0)},
        "end_step of 'lm loss' is 50, but its last value is at step 26",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_golden_values_that_are_not_those_of_their_header(tmp_path, case):
    document, words = CONTRADICTIONS[case]
    evidence = read_curves(file(tmp_path, "golden.json", json.dumps(document)))
    assert words in evidence.contradictions[0]


@pytest.mark.parametrize(
    "document",
    [
        by_iteration(range(1, 51)),
        by_iteration([1, *range(5, 51, 5)], step_interval=5),
        by_iteration([1, *range(100, 1001, 100)], step_interval=100, end_step=1000),
        {"lm loss": metric([10.0 - step / 100 for step in range(10)], start=0)},
        {"lm loss": {"values": {"1": 10.0, "2": 9.0}}},
    ],
    ids=["every", "every fifth", "every hundredth", "list", "no header"],
)
def test_golden_values_that_are_those_of_their_header(tmp_path, document):
    evidence = read_curves(file(tmp_path, "golden.json", json.dumps(document)))
    assert evidence.contradictions == ()


def test_iterations_before_a_resume_are_missing_and_later_nans_are_not(tmp_path):
    """Megatron-LM's ``_2nd`` files: the pass resumed after iteration 50 and ran none before."""
    values = {
        str(step): "nan" if step <= 25 or step == 40 else 10.0 - step / 100 for step in range(1, 51)
    }
    header = {"start_step": 1, "end_step": 50, "step_interval": 1}
    document = {"lm loss": {**header, "values": values}, "grad-norm": {**header, "values": values}}
    evidence = read_curves(file(tmp_path, "golden_values_2nd.json", json.dumps(document)))
    assert evidence.steps.tolist() == list(range(26, 51))
    assert [math.isnan(value) for value in evidence.signals["loss"]].count(True) == 1
    assert len(evidence.signals["grad_norm"]) == 25
    assert evidence.contradictions == ()


@pytest.mark.parametrize("bad", ["nan", math.nan])
def test_a_golden_value_that_is_nan_stays_nan(tmp_path, bad):
    text = golden(lm_loss=metric({"1": 10.8, "5": bad}))
    evidence = read_curves(file(tmp_path, "golden.json", text))
    assert math.isnan(evidence.signals["loss"][1])
    assert evidence.signals["loss"].present.all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (golden(lm_loss=metric({"1": 10.8}))[:-9], "not JSON: "),
        (golden(lm_loss=metric({"1": "low"})), "lm loss, step 1: the value is 'low'"),
        (golden(lm_loss=metric({"one": 1.0})), "lm loss: step is 'one', which is not a number"),
        (golden(lm_loss=metric(5)), "lm loss: values is a int, must be a JSON object or a list"),
        (golden(lm_loss=metric([1.0], start=None)), "lm loss: start_step is None"),
        (golden(lm_loss=metric([1.0], interval=0)), "lm loss: step_interval is 0"),
        (golden(iteration_time=metric({"1": 1.0})), "no loss among 'iteration time'"),
        ('{"lm loss": {"values": {"1": 1.0, "1": 2.0}}}', "the key '1' occurs twice"),
        ('{"lm loss": [1.0]}\n', "no loss|no step"),
    ],
)
def test_golden_values_that_cannot_be_understood(tmp_path, text, words):
    with pytest.raises(EvidenceError, match=words):
        read_curves(file(tmp_path, "golden_values.json", text))


def test_the_user_says_which_metric_is_the_loss(tmp_path):
    text = json.dumps({"mtp_1 loss": metric({"1": 9.0}), "lm loss": metric({"1": 8.0})})
    evidence = read_curves(file(tmp_path, "golden.json", text), {"loss": "mtp_1 loss"})
    assert evidence.signals["loss"] == (9.0,)
