"""metrics.jsonl: strict JSON, no number that JSON lacks, complete only when it says so."""

import json
import math

import pytest

from converge_harness.run_folder.documents import to_json, write_json
from converge_harness.run_folder.metrics import (
    MetricsWriter,
    SupersededError,
    Unmeasured,
    draws_random_numbers,
    uncounted,
    uncounted_parameters,
)


def names(folder):
    return sorted(path.name for path in folder.glob("*"))


def test_numbers_keep_their_full_precision_and_non_finite_ones_are_strings():
    text = to_json({"a": 0.1 + 0.2, "b": math.nan, "c": [math.inf, -math.inf], "d": None})
    assert json.loads(text) == {"a": 0.1 + 0.2, "b": "nan", "c": ["inf", "-inf"], "d": None}


def test_a_value_that_is_no_json_is_refused():
    with pytest.raises(TypeError):
        to_json({"a": object()})


def test_what_could_not_be_measured_names_its_parameters():
    assert uncounted_parameters([]) == []
    problems = [Unmeasured("no logits: replayed"), *[Unmeasured("partial", "w.a")] * 2]
    names = uncounted_parameters(problems)
    assert names == ["w.a"]
    sentences = [each.sentence for each in problems]
    assert sentences == ["no logits: replayed", "w.a: partial", "w.a: partial"]
    assert uncounted({"problems": sentences, "uncounted": names}) == ["w.a"]
    assert uncounted({"problems": sentences}) == ["w.a", "w.a"]  # as older versions wrote it


def test_the_file_gets_its_name_when_training_is_complete(tmp_path):
    writer = MetricsWriter(tmp_path / "run", {"identity": "x", "world_size": 2, "versions": {}})
    writer.step({"step": 1, "loss": math.nan}, {"tokens": 64})
    part = tmp_path / "run" / "metrics.jsonl.part"
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    assert lines == [
        {"schema": 1, "kind": "header", "identity": "x", "world_size": 2, "versions": {}},
        {"kind": "step", "step": 1, "loss": "nan", "tokens": 64},
    ]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    writer.finish(1)
    assert not part.exists()
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"kind": "end", "steps": 1}


def test_write_json_leaves_no_part_behind(tmp_path):
    write_json(tmp_path / "a.json", {"a": math.inf})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": "inf"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_run_that_starts_over_keeps_nothing_of_the_earlier_start(tmp_path):
    before = MetricsWriter(tmp_path, {"life": 1})
    before.step({"step": 1}, {})
    (tmp_path / "tensors").mkdir()
    (tmp_path / "tensors" / "step-00000008.npz").touch()
    write_json(tmp_path / "in_force.json", {})
    after = MetricsWriter(tmp_path, {"life": 2})
    assert names(tmp_path / "tensors") == []
    assert names(tmp_path) == ["metrics.jsonl.part", "tensors"]
    with pytest.raises(SupersededError, match="started again"):
        before.step({"step": 2}, {})
    with pytest.raises(SupersededError, match="started again"):
        before.finish(2)
    before._stream.close()
    after.step({"step": 1}, {})
    after.finish(1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("life") for line in lines] == [2, None, None]


def test_a_finished_run_that_starts_over_is_unfinished_again(tmp_path):
    MetricsWriter(tmp_path, {"life": 1}).finish(0)
    after = MetricsWriter(tmp_path, {"life": 2})
    assert names(tmp_path) == ["metrics.jsonl.part"]
    after.finish(0)
    assert '"life": 2' in (tmp_path / "metrics.jsonl").read_text()


def drawing(path, *states):
    """A pass whose steps, from 1, drew random numbers from these states."""
    lines = ({"kind": "step", "step": n, "random_state": s} for n, s in enumerate(states, 1))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{cut")
    return path


def test_a_run_that_draws_random_numbers_does_so_in_two_steps_in_succession(tmp_path):
    assert draws_random_numbers([tmp_path / "none", drawing(tmp_path / "a", "", "b", "c")])
    assert not draws_random_numbers([drawing(tmp_path / "a", "a", "", "c", None)])
