"""metrics.jsonl: strict JSON, no number that JSON lacks, complete only when it says so."""

import json
import math

import pytest

from harness.rank.writer import MetricsWriter, to_json, write_json


def test_numbers_keep_their_full_precision_and_non_finite_ones_are_strings():
    text = to_json({"a": 0.1 + 0.2, "b": math.nan, "c": [math.inf, -math.inf], "d": None})
    assert json.loads(text) == {"a": 0.1 + 0.2, "b": "nan", "c": ["inf", "-inf"], "d": None}


def test_a_value_that_is_no_json_is_refused():
    with pytest.raises(TypeError):
        to_json({"a": object()})


def test_the_file_gets_its_name_when_training_is_complete(tmp_path):
    writer = MetricsWriter(tmp_path / "run", {"identity": "x", "world_size": 2})
    writer.step({"step": 1, "loss": math.nan})
    part = tmp_path / "run" / "metrics.jsonl.part"
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    assert lines == [
        {"schema": 1, "kind": "header", "identity": "x", "world_size": 2},
        {"kind": "step", "step": 1, "loss": "nan"},
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
