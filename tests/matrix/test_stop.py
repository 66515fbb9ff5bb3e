"""What is said of a test set while it trains; real runs: ``tests/e2e/test_stopped_sets.py``."""

from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.launch.options import LookError, Training
from converge_harness.matrix.load import load_plan
from converge_harness.matrix.stop import look_at_running
from converge_harness.model import Role, RunRecord, RunStatus
from converge_harness.trainers import assume_toolchain

ROOT = Path(__file__).parents[2]
EXPERIMENT = f"""
schema = 1
repeats = ["ulp", "rerun"]
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
set = {{ "training.steps" = 100 }}
[control]
name = "fsdp2"
parallelism = {{ dp_shard = 2 }}
[controls.mixed]
parallelism = {{ dp_shard = 2 }}
set = {{ "training.mixed_precision_param" = "bfloat16" }}
[[test]]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
[[test]]
name = "mixed_ddp2"
control = "mixed"
parallelism = {{ dp_replicate = 2 }}
set = {{ "training.mixed_precision_param" = "bfloat16" }}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("stop") / "matrix.toml"
    path.write_text(EXPERIMENT)
    return load_plan(path, (), on_gpu=False, find=assume_toolchain)


def finished(plan, folder, *names):
    return {
        plan.job(name).identity: RunRecord(
            name, plan.job(name).identity, folder, RunStatus.FINISHED, 1.0, ()
        )
        for name in names
    }


def repeats(plan, control):
    return [job.name for job in plan.jobs if job.role is Role.REPEAT and job.spec.name == control]


def training(plan, folder, **steps):
    return {plan.job(name).identity: Training(folder, step) for name, step in steps.items()}


def test_nothing_is_said_before_all_have_come_as_far_that_a_set_is_judged_by(plan, tmp_path):
    look, ddp2 = look_at_running(plan), plan.job("ddp2")
    everyone = ("fsdp2", *repeats(plan, "fsdp2"))
    so_far = dict.fromkeys(everyone, 16)
    assert look(ddp2, {}, training(plan, tmp_path, ddp2=17)) is None
    late = training(plan, tmp_path, ddp2=17, **so_far | {"fsdp2": 15})
    assert look(ddp2, {}, late) is None
    missing = finished(plan, tmp_path, *everyone[:-1])
    assert look(ddp2, missing, training(plan, tmp_path, ddp2=17)) is None
    # Now it is judged; there is nothing to read.
    last = training(plan, tmp_path, ddp2=17, **{everyone[-1]: 16})
    for records, here in (({}, training(plan, tmp_path, ddp2=17, **so_far)), (missing, last)):
        with pytest.raises(LookError):
            look(ddp2, records, here)


def test_a_reference_has_to_finish(plan, tmp_path):
    """It trains one step: with its first it is nearly over, but not whole."""
    look, test = look_at_running(plan), plan.job("mixed_ddp2")
    everyone = finished(plan, tmp_path, "mixed", *repeats(plan, "mixed"))
    assert test.reference is not None
    begun = training(plan, tmp_path, mixed_ddp2=17, **{test.reference: 1})
    assert look(test, everyone, begun) is None
    ended = everyone | finished(plan, tmp_path, test.reference)
    with pytest.raises(LookError):  # there is nothing to read
        look(test, ended, training(plan, tmp_path, mixed_ddp2=17))


def test_it_is_said_why_evidence_cannot_be_judged(plan, tmp_path):
    (tmp_path / "job.json").write_text("{")
    everyone = finished(plan, tmp_path, "fsdp2", *repeats(plan, "fsdp2"))
    here = training(plan, tmp_path, ddp2=16)
    with pytest.raises(LookError, match=r"job\.json"):
        look_at_running(plan)(plan.job("ddp2"), everyone, here)


def test_a_run_that_is_also_another_sets_is_never_stopped(plan, tmp_path):
    ddp2 = plan.job("ddp2")
    control = replace(ddp2, name="also a control", role=Role.CONTROL)
    shared = replace(plan, jobs=(control, *plan.jobs))
    assert look_at_running(shared)(ddp2, {}, training(plan, tmp_path, ddp2=16)) == ""
