"""What is said of a test set while it trains; real runs: ``tests/e2e/test_stopped_sets.py``."""

from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.matrix.load import load_plan
from converge_harness.matrix.stop import look_at_running
from converge_harness.model import Role, RunRecord, RunStatus
from converge_harness.trainers import assume_toolchain

SMOKE = Path(__file__).parents[2] / "experiments" / "smoke.toml"


@pytest.fixture(scope="module")
def plan():
    return load_plan(SMOKE, (), on_gpu=False, find=assume_toolchain)


def finished(plan, folder, *names):
    return {
        plan.job(name).identity: RunRecord(
            name, plan.job(name).identity, folder, RunStatus.FINISHED, 1.0, ()
        )
        for name in names
    }


def repeats(plan, control):
    return [job.name for job in plan.jobs if job.role is Role.REPEAT and job.spec.name == control]


def test_nothing_is_said_before_the_runs_have_finished_that_a_set_is_judged_by(plan, tmp_path):
    look, ddp2, mixed = look_at_running(plan), plan.job("ddp2"), plan.job("mixed_tp2")
    assert look(ddp2, tmp_path, {}) is None
    assert look(ddp2, tmp_path, finished(plan, tmp_path, "fsdp2")) is None
    names = ("fsdp2_mixed", *repeats(plan, "fsdp2_mixed"))
    assert look(mixed, tmp_path, finished(plan, tmp_path, *names)) is None  # its reference


def test_evidence_that_cannot_be_judged_stops_nothing(plan, tmp_path):
    (tmp_path / "job.json").write_text("{")
    names = ("fsdp2", *repeats(plan, "fsdp2"))
    assert look_at_running(plan)(plan.job("ddp2"), tmp_path, finished(plan, tmp_path, *names)) == ""


def test_a_run_that_is_also_another_sets_is_never_stopped(plan, tmp_path):
    ddp2 = plan.job("ddp2")
    control = replace(ddp2, name="also a control", role=Role.CONTROL)
    shared = replace(plan, jobs=(control, *plan.jobs))
    assert look_at_running(shared)(ddp2, tmp_path, {}) == ""
