"""Run folders that an earlier commit wrote (``runs/README.md``) fit the contract of today."""

import json
from pathlib import Path

import numpy as np
import pytest

from converge_harness.model import FaultKind, Kind, RunStatus
from converge_harness.readers import read_run
from converge_harness.readers.run_folder.run import read_spec
from converge_harness.run_folder import faults, in_force, job
from converge_harness.run_folder.arrays import KEYS, PROJECTIONS
from converge_harness.run_folder.documents import SCHEMA, SchemaError, number, to_json, upgraded
from converge_harness.run_folder.layout import JOB, RECORD, arrays_name, manifest_name
from converge_harness.run_folder.metrics import BATCH_DIGEST, HEADER, KINDS, SIGNALS, step_reached
from converge_harness.run_folder.passes import last_step, pass_folders, passes_with_metrics
from converge_harness.run_folder.records import RecordDocument
from converge_harness.run_folder.shapes import misfit
from converge_harness.seal import stale
from converge_harness.store import read_record

HERE = Path(__file__).parent / "runs"
NAMES = ("command", "faults", "fsdp2", "titan_0_2")
RUNS = [pytest.param(HERE / name, id=name) for name in NAMES]


def document(path):
    value = json.loads(path.read_text())
    assert value.pop("schema") == SCHEMA
    return value


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("run", RUNS)
def test_a_job_has_no_key_that_the_contract_does_not_name(run):
    told = document(run / JOB)
    assert told.keys() <= job.JobDocument.__annotations__.keys()
    assert told["train_config"].keys() <= job.TrainConfigDocument.__annotations__.keys()
    assert (told["data"] or {}).keys() <= job.DataDocument.__annotations__.keys()
    assert (told["recovery"] or {}).keys() <= job.RecoveryDocument.__annotations__.keys()
    assert told.get("command", {}).keys() <= job.CommandDocument.__annotations__.keys()
    for fault in told["faults"]:
        assert fault.keys() | {"grace_s", "saves"} == job.FaultDocument.__annotations__.keys()
    assert not misfit(told, job.SHAPES)


@pytest.mark.parametrize("run", RUNS)
def test_ranks_of_today_understand_a_job_of_then(run):
    told, read = document(run / JOB), job.read_job(run / JOB)
    assert (read.name, read.dialect, read.steps) == (told["name"], told["dialect"], told["steps"])
    assert read.sample_steps == tuple(told["sample_steps"])
    assert [fault.kind for fault in read.faults] == [fault["kind"] for fault in told["faults"]]
    assert read.is_probed


@pytest.mark.parametrize("run", RUNS)
def test_every_array_and_every_line_is_one_of_the_contract(run):
    for path in run.rglob("*.npz"):
        with np.load(path) as arrays:
            assert set(arrays) <= KEYS
            assert arrays["schema"] == SCHEMA
            for name in arrays:
                assert not name.endswith("_sketch") or arrays[name].shape[-1] == PROJECTIONS
    for path in run.rglob("metrics.jsonl*"):
        first, *rest = lines(path)
        assert (first["kind"], first["schema"]) == (HEADER, SCHEMA)
        assert {line["kind"] for line in rest} <= set(KINDS)
        steps = [line for line in rest if line["kind"] == "step"]
        known = {*SIGNALS, BATCH_DIGEST, "batch_agrees", "kind", "step"}
        assert all(line.keys() <= known for line in steps)
    for path in run.rglob("in_force.json"):
        ran = document(path)
        assert ran.keys() <= in_force.InForceDocument.__annotations__.keys()
        assert not misfit(ran, in_force.SHAPES)
    for path in faults.struck_files(run).values():
        assert not misfit(document(path), faults.SHAPES)


@pytest.mark.parametrize("run", RUNS)
def test_a_record_has_no_key_that_the_contract_does_not_name(run):
    assert document(run / RECORD).keys() <= RecordDocument.__annotations__.keys()
    record = read_record(run)
    assert record.status is RunStatus.FINISHED
    assert "after the run had finished" not in stale(record)  # every file is what the run left


@pytest.mark.parametrize("run", RUNS)
def test_lines_are_written_today_as_they_were_then(run):
    for path in run.rglob("metrics.jsonl*"):
        for line in path.read_text().splitlines():
            assert to_json(json.loads(line)) == line


def test_an_uninterrupted_run_is_read_as_then():
    evidence = read_run(HERE / "fsdp2")
    assert evidence.complete
    assert evidence.steps.tolist() == list(range(1, 21))
    assert evidence.signals["loss"].values[0] == 6.72078800201416
    (sample,) = evidence.samples
    assert (sample.step, len(sample.names)) == (1, 3)
    assert sample.post_step.states == ("exp_avg", "exp_avg_sq")
    assert len(evidence.frozen.loss) == 2
    assert evidence.frozen.again is not None
    assert step_reached(HERE / "fsdp2") == 20


def test_a_run_of_the_older_torchtitan_is_read_as_then():
    evidence = read_run(HERE / "titan_0_2")
    assert evidence.complete
    assert read_spec(HERE / "titan_0_2").toolchain == "titan_0_2"


def test_passes_faults_and_checkpoints_are_read_as_then():
    run = HERE / "faults"
    evidence = read_run(run)
    assert [each.number for each in evidence.passes] == [1, 2]
    assert [each.loaded_step for each in evidence.passes] == [0, 4]
    assert [each.whole for each in evidence.passes] == [(4,), (8,)]
    assert evidence.passes[1].loaded.step == evidence.passes[0].saved[0].step == 4
    assert [each.kind for each in evidence.struck] == [FaultKind.HANG]
    spec = read_spec(run)
    assert (spec.kind, spec.recovery.checkpoint_every) == (Kind.FAULT, 4)
    assert passes_with_metrics(run) == pass_folders(run)
    assert last_step(run) == 12


def test_a_program_that_was_probed_is_read_as_then():
    evidence = read_run(HERE / "command")
    assert evidence.complete
    assert evidence.in_force.probing.wrapping == "FSDP2"
    assert read_spec(HERE / "command").trainer.kind == "command"


def test_names_of_files_are_those_of_then():
    run = HERE / "faults" / "passes" / "001"
    assert (run / "tensors" / arrays_name("step", 1)).is_file()
    assert (run / "state" / arrays_name("saved-step", 4)).is_file()
    assert (run / "state" / manifest_name(4)).is_file()


def test_a_file_of_an_older_schema_is_brought_up_step_by_step(monkeypatch):
    monkeypatch.setattr("converge_harness.run_folder.documents.SCHEMA", 3)
    monkeypatch.setattr(
        "converge_harness.run_folder.documents.UPGRADES",
        {(JOB, 2): lambda value: {**value, "schema": 3, "new": value["old"] + 1}},
    )
    assert upgraded(JOB, {"schema": 1, "old": 1})["new"] == 2
    assert upgraded(RECORD, {"schema": 1, "old": 1}) == {"schema": 1, "old": 1}
    with pytest.raises(SchemaError, match="schema 4 by a newer converge"):
        upgraded(JOB, {"schema": 4})


def test_metrics_and_arrays_of_an_older_schema_are_brought_up(monkeypatch):
    def louder(line):
        return {**line, "schema": 2} | ({"loss": 2 * line["loss"]} if "loss" in line else {})

    def longer(arrays):
        return {**arrays, "schema": 2, "parameters_norm": 3 * arrays["parameters_norm"]}

    then = read_run(HERE / "fsdp2")
    monkeypatch.setattr("converge_harness.run_folder.documents.SCHEMA", 2)
    upgrades = {("metrics.jsonl", 1): louder, ("step.npz", 1): longer}
    monkeypatch.setattr("converge_harness.run_folder.documents.UPGRADES", upgrades)
    now = read_run(HERE / "fsdp2")
    assert not now.problems
    assert np.array_equal(now.signals["loss"].values, 2 * then.signals["loss"].values)
    first, again = (run.samples[0].parameters for run in (then, now))
    assert np.array_equal(again.norm, 3 * first.norm)


def test_what_older_jobs_do_not_say_has_a_meaning():
    older = {"checkpoint_every": 2, "elastic_nodes": True}
    assert job.recovery_of(older) == {"faults": [], "checkpoint_every": 2, "nodes": [1, 2]}
    assert job.recovery_of({"checkpoint_every": 2})["nodes"] == [1, 1]
    assert job.recovery_of({"checkpoint_every": None}) is None


def test_numbers_that_json_has_none_for_are_spelt_in_one_way():
    values = [float("nan"), float("inf"), float("-inf"), 1.5]
    assert json.loads(to_json({"a": values}))["a"] == ["nan", "inf", "-inf", 1.5]
    back = [number(each) for each in json.loads(to_json({"a": values}))["a"]]
    assert np.array_equal(back, values, equal_nan=True)


def test_every_value_of_in_force_has_a_shape():
    keys = in_force.InForceDocument.__annotations__.keys()
    assert keys == {key for key in in_force.SHAPES if "." not in key}
