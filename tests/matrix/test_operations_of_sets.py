"""The rerun that looks into a wrong module, and what becomes of its finding."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from converge_harness.errors import EvidenceError, ToolchainError
from converge_harness.experiment import load_experiment
from converge_harness.matrix import operations
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.operations import (
    FindingOfSet,
    find_operation,
    read_findings,
    to_look_into,
    with_findings,
    write_findings,
)
from converge_harness.model import Judgement, RunStatus, Technique, Verdict
from converge_harness.readers import read_operations
from converge_harness.report import build_view
from converge_harness.run_folder.operations import write_operations
from converge_harness.trainers import assume_toolchain
from converge_harness.trainers.base import job_document

ROOT = Path(__file__).parents[2]
WRONG = Verdict(
    "compile",
    "fsdp2",
    Judgement.FAIL,
    module="layers.1",
    first_wrong="the output of layers.1 is off",
    wrong_forward=True,
)


@pytest.fixture(autouse=True)
def without_toolchains(monkeypatch):
    def planned(experiment, **more):
        return plan_experiment(experiment, **more, find=assume_toolchain)

    monkeypatch.setattr(operations, "plan_experiment", planned)
    monkeypatch.setattr(operations, "gpu_ids", list)


def experiment(name="smoke"):
    return load_experiment(ROOT / "experiments" / f"{name}.toml")


def tensor(value, made_by):
    kind = {"kind": "float32[1]", "norm": abs(value), "not_finite": 0}
    return {**kind, "sums": [value, -value], "made_by": made_by}


def call(factor):
    """A module that doubles, or should."""
    given, result = tensor(1.0, -1), tensor(factor, 0)
    operation = {
        "name": "aten.mul.Tensor",
        "module": "layers.1.norm",
        "settings": [str(factor)],
        "inputs": [given],
        "outputs": [result],
    }
    return {
        "module": "layers.1",
        "problem": "",
        "operations": [operation],
        "left_out": 0,
        "inputs": [given],
        "outputs": [result],
    }


def running(tmp_path, factor, status=RunStatus.FINISHED):
    """Runs a plan: its test set's module computes with ``factor``; the plan is kept."""

    def run(plan):
        run.plan = plan
        records = []
        for each in plan.jobs:
            folder = tmp_path / each.name
            folder.mkdir()
            write_operations(folder, 0, call(factor if each.name == "compile" else 2.0))
            ended = status if each.name == "compile" else RunStatus.FINISHED
            records.append(SimpleNamespace(folder=folder, status=ended))
        return SimpleNamespace(records=records)

    return run


def test_both_sets_run_again_without_compile_for_few_steps_with_their_operations(tmp_path):
    run = running(tmp_path, 2.1)
    finding = find_operation(experiment(), WRONG, run, None)
    assert finding == FindingOfSet(
        module="layers.1",
        sentence="without compile, inside layers.1, aten.mul.Tensor (operation 1 of 1 in "
        "layers.1.norm) is off by 0.05 (rounding: 1e-06) while its inputs agree; it gets 2.1 "
        "(control: 2.0)",
        operation="aten.mul.Tensor",
    )
    for name in ("compile", "fsdp2"):
        job = run.plan.job(name)
        assert (job.spec.operations_of, job.steps) == ("layers.1", 2)
        assert Technique.COMPILE not in job.spec.techniques
        written = job_document(job, tmp_path, data=None, seed_checkpoint=None, device="cpu")
        assert written["operations_of"] == "layers.1"
    assert [each.repeat.kind.value for each in run.plan.repeats_of(run.plan.job("fsdp2"))] == [
        "ulp"
    ]


def test_a_run_that_records_operations_is_another_run():
    plan = plan_experiment(experiment(), on_gpu=False, find=assume_toolchain)
    (control,) = plan.experiment.controls[:1]
    with_them = replace(control, operations_of="norm")
    whole = replace(plan.experiment, controls=(with_them, *plan.experiment.controls[1:]))
    again = plan_experiment(whole, on_gpu=False, find=assume_toolchain)
    assert plan.job(control.name).identity != again.job(control.name).identity
    assert plan.job("ddp2").identity == again.job("ddp2").identity


def test_a_module_that_is_right_without_compile_differs_by_compile(tmp_path):
    finding = find_operation(experiment(), WRONG, running(tmp_path, 2.0), None)
    assert finding.sentence == (
        "without compile, what layers.1 returns in its first call is right: the difference comes "
        "with compile"
    )
    assert not finding.operation


@pytest.mark.parametrize(
    ("name", "file", "why"),
    [
        ("async_tp", "async_tp", "cannot run again without compile: async_tp needs compile"),
        ("elastic", "elastic", "is judged by its resumes, and only sets of one pass can be looked"),
    ],
)
def test_what_cannot_run_again_is_said(name, file, why):
    whole = experiment(file)
    spec = next(each for each in whole.tests if name in each.technique_names or file == "elastic")
    wrong = replace(WRONG, name=spec.name, control=spec.control)
    finding = find_operation(whole, wrong, None, None)
    assert why in finding.sentence
    assert not finding.operation


def test_a_toolchain_that_is_gone_is_said(monkeypatch):
    def gone(*_arguments, **_more):
        raise ToolchainError("torchtitan-0.3.0 is not built")

    monkeypatch.setattr(operations, "plan_experiment", gone)
    finding = find_operation(experiment(), WRONG, None, None)
    assert finding.sentence.endswith(
        "it cannot run again without compile: torchtitan-0.3.0 is not built"
    )


def test_a_rerun_that_ends_early_tells_nothing(tmp_path):
    run = running(tmp_path, 2.1, RunStatus.CRASHED)
    finding = find_operation(experiment(), WRONG, run, None)
    assert "the rerun of compile has not finished: crashed" in finding.sentence
    assert not finding.operation


def test_only_failed_sets_with_a_wrong_forward_pass_are_looked_into():
    others = (
        replace(WRONG, judgement=Judgement.INVALID),
        replace(WRONG, module=""),
        replace(WRONG, wrong_forward=False),
    )
    assert to_look_into((*others, WRONG)) == (WRONG,)


def test_what_was_told_is_shown_as_long_as_it_is_the_same_module(tmp_path):
    findings = {
        name: FindingOfSet(module="layers.1", sentence="inside it, aten.mul.Tensor is off")
        for name in ("compile", "schema")
    }
    write_findings(tmp_path, findings)
    assert read_findings(tmp_path) == findings

    def shown(verdict):
        view = build_view(title="one", verdicts=[verdict])
        return with_findings(view, read_findings(tmp_path)).tests[0].verdict.first_wrong

    assert shown(WRONG) == ("the output of layers.1 is off; inside it, aten.mul.Tensor is off")
    assert shown(replace(WRONG, module="layers.2")) == WRONG.first_wrong
    assert shown(replace(WRONG, name="other")) == WRONG.first_wrong
    write_findings(tmp_path, {})
    assert read_findings(tmp_path) == {}
    (tmp_path / operations.FILE).write_text('{"schema": 1, "compile": 3}')
    assert read_findings(tmp_path) == {}
    (tmp_path / operations.FILE).write_text('{"schema": 1, "sets": {"compile": 3}}')
    assert read_findings(tmp_path) == {}


def test_a_damaged_file_of_a_rank_is_refused_by_name(tmp_path):
    document = call(2.0)
    del document["operations"][0]["settings"]
    write_operations(tmp_path, 3, document)
    with pytest.raises(EvidenceError, match=r"rank-00003.json: is not as a rank writes it"):
        read_operations(tmp_path)
