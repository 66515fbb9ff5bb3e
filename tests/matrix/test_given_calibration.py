"""Which calibration judges: one learnt from these very controls, or none."""

from dataclasses import replace

import numpy as np
import pytest

from converge_harness.calibrations import StoredCalibration, read_calibrations, write_calibrations
from converge_harness.cli import main
from converge_harness.errors import ConfigError, StoreError
from converge_harness.matrix.calibrate import (
    read_for_curves,
    read_given,
    read_judged_by,
    store_calibrations,
)
from converge_harness.matrix.judge import pairs_of
from converge_harness.matrix.load import load_plan
from converge_harness.model import Calibration, Evidence, Precision, Role, SignalScale
from converge_harness.plan import identity_facts
from converge_harness.store import Store
from converge_harness.trainers import assume_toolchain

TRAIN_CONFIG = """
[training]
steps = 20
local_batch_size = 4
global_batch_size = 8
seq_len = 256
mixed_precision_param = "float32"
[converge.data]
"""
EXPERIMENT = """
schema = 1
[trainer]
train_config = "t.toml"
[control]
name = "fsdp2"
parallelism.dp_shard = 2
[controls.float8]
parallelism.dp_shard = 2
techniques = ["float8"]
waive = ["control-is-1d-fsdp"]
[anchor]
parallelism = {}
[[test]]
name = "ddp2"
parallelism.dp_replicate = 2
[[test]]
name = "float8_ddp2"
control = "float8"
parallelism.dp_replicate = 2
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    (tmp_path / "t.toml").write_text(TRAIN_CONFIG)
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT)
    return path


def plan_of(experiment, calibration=None):
    return load_plan(experiment, (), on_gpu=False, calibration=calibration, find=assume_toolchain)


def calibration(name: str, identity: str | None, **changes) -> Calibration:
    values = {
        "control": name,
        "identity": identity,
        "precision": Precision.FP32,
        "repeats": (f"{name}.ulp",),
        "taught_by": 1,
        "signals": {"loss": SignalScale(np.array([1]), np.array([1e-7]), 0.5)},
    }
    return Calibration(**{**values, **changes})


@pytest.fixture
def calibrated(experiment, tmp_path):
    """A file with the calibrations of both controls, as `converge calibrate` writes it."""
    plan = plan_of(experiment)
    path = tmp_path / "c.json"
    write_calibrations(
        path,
        [
            StoredCalibration(
                calibration(job.name, job.identity),
                {},
                identity_facts(job, plan.surroundings),
                "2026-02-03",
            )
            for job in plan.jobs
            if job.role is Role.CONTROL
        ],
    )
    return path


def refusals(plan) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_given(plan)
    return [str(problem) for problem in caught.value.problems]


def test_without_a_file_the_repeats_teach(experiment):
    assert read_given(plan_of(experiment)) is None


def test_a_current_calibration_is_taken_and_no_repeat_is_planned(experiment, calibrated):
    plan = plan_of(experiment, calibrated)
    assert {name: each.calibration.control for name, each in read_given(plan).items()} == {
        "fsdp2": "fsdp2",
        "float8": "float8",
    }
    assert not [job for job in plan.jobs if job.role is Role.REPEAT]


def test_the_experiment_can_name_the_file_itself(experiment, calibrated):
    experiment.write_text(EXPERIMENT.replace("schema = 1", 'schema = 1\ncalibration = "c.json"'))
    assert read_given(plan_of(experiment)).keys() == {"fsdp2", "float8"}


def test_another_name_for_the_same_control_is_no_matter(experiment, calibrated):
    experiment.write_text(EXPERIMENT.replace('name = "fsdp2"', 'name = "control"'))
    renamed = read_given(plan_of(experiment, calibrated))["control"]
    assert renamed.calibration.control == "control"


def test_a_stale_one_is_refused_with_what_changed_and_the_command_that_renews_it(
    experiment, calibrated
):
    experiment.write_text(
        EXPERIMENT.replace("[trainer]", 'seed = 7\n[trainer]\nset = { "training.max_norm" = 2 }')
    )
    fsdp2, float8 = refusals(plan_of(experiment, calibrated))
    assert fsdp2.startswith(f"{calibrated}: control 'fsdp2': ")
    assert "seed is 7, was 42" in fsdp2
    assert "overrides.training.max_norm is 2, was not there" in fsdp2
    assert f"(renew it with: converge calibrate {experiment} --out {calibrated})" in fsdp2
    assert "control 'float8'" in float8


def test_other_hardware_and_versions_make_it_stale(experiment, calibrated):
    plan = plan_of(experiment, calibrated)
    elsewhere = replace(plan.surroundings, hardware="gpu NVIDIA H200")
    moved = replace(
        plan,
        jobs=tuple(replace(job, identity=job.identity[::-1]) for job in plan.jobs),
        surroundings=elsewhere,
    )
    with pytest.raises(ConfigError, match='hardware is "gpu NVIDIA H200", was "cpu-'):
        read_given(moved)


def test_a_control_that_the_file_does_not_know_is_named(experiment, calibrated):
    write_calibrations(calibrated, read_calibrations(calibrated)[:1])
    (only,) = refusals(plan_of(experiment, calibrated))
    assert "control 'float8': is not in it; the file was learnt from 'fsdp2'" in only


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x00\xff"])
def test_a_missing_or_damaged_file_is_refused(experiment, calibrated, content):
    calibrated.unlink()
    if content is not None:
        calibrated.write_bytes(content)
    (only,) = refusals(plan_of(experiment, calibrated))
    assert "c.json" in only
    if content is None:
        assert f"converge calibrate {experiment} --out {calibrated}" in only


def test_only_sound_calibrations_are_kept_in_the_store(tmp_path):
    store = Store(tmp_path)
    sound = StoredCalibration(calibration("a", "a" * 64), {}, {}, "")
    problem = StoredCalibration(calibration("b", "b" * 64, problems=("it differs",)), {}, {}, "")
    untaught = StoredCalibration(calibration("c", "c" * 64, repeats=()), {}, {}, "")
    assert store_calibrations(store, [sound, problem, untaught]) == [
        store.calibration_file("a" * 64)
    ]
    assert [path.name for path in (tmp_path / "calibrations").iterdir()] == [f"{'a' * 64}.json"]


def test_a_report_folder_remembers_what_judged(experiment, calibrated, tmp_path):
    plan = plan_of(experiment, calibrated)
    identities = {job.name: job.identity for job in plan.jobs}
    assert read_judged_by(plan, calibrated, identities).keys() == {"fsdp2", "float8"}
    with pytest.raises(StoreError, match="no calibration of 'float8' as it was run"):
        read_judged_by(plan, calibrated, identities | {"float8": "0" * 64})
    write_calibrations(calibrated, read_calibrations(calibrated)[:1])
    with pytest.raises(StoreError, match="no calibration of 'float8'"):
        read_judged_by(plan, calibrated, identities)


def test_the_first_control_is_judged_against_the_anchor_by_its_own_repeats(experiment):
    pairs = [
        (pair.test.name, pair.control.name, pair.calibrated)
        for pair in pairs_of(plan_of(experiment))
    ]
    assert pairs == [
        ("fsdp2", "anchor", "fsdp2"),
        ("ddp2", "fsdp2", "fsdp2"),
        ("float8_ddp2", "float8", "float8"),
    ]


# ---------------------------------------------------------------------- curves


def curve(identity: str | None, precision: Precision = Precision.FP32) -> Evidence:
    return Evidence(
        "c", "runs/c", steps=np.array([1]), signals={}, identity=identity, precision=precision
    )


def for_curves(tmp_path, held: Calibration, control: Evidence):
    path = tmp_path / "c.json"
    write_calibrations(path, [StoredCalibration(held, {}, {}, "")])
    return read_for_curves(path, control)


def test_a_run_of_ours_is_judged_by_its_own_calibration_only(tmp_path):
    held = calibration("fsdp2", "a" * 64)
    found, note = for_curves(tmp_path, held, curve("a" * 64))
    assert (found.identity, note) == ("a" * 64, "")
    for other in (curve("b" * 64), curve(None)):
        with pytest.raises(ConfigError, match=r"limits of 'fsdp2' \(run aaaaaaaaaaaa\), not of"):
            for_curves(tmp_path, held, other)


def test_curves_from_elsewhere_are_taken_on_trust_with_a_note(tmp_path):
    found, note = for_curves(tmp_path, calibration("main", None), curve(None))
    assert found.control == "main"
    assert "whether 'c' is such a run cannot be checked" in note
    with pytest.raises(ConfigError, match="limits of one precision do not hold for another"):
        for_curves(tmp_path, calibration("main", None), curve(None, Precision.BF16))


# -------------------------------------------------------------------- commands


def test_calibrating_wants_controls_by_their_names(experiment, capsys):
    assert main(["calibrate", str(experiment), "--only", "flaot8"]) == 2
    assert "no control 'flaot8' (did you mean 'float8'?" in capsys.readouterr().err


def test_a_plan_shows_the_anchor_the_samples_and_where_tolerances_come_from(
    experiment, calibrated, capsys
):
    assert main(["plan", str(experiment), "--calibration", str(calibrated)]) == 0
    shown = capsys.readouterr().out
    assert "anchor: the control is itself judged against one rank" in shown
    assert f"limits from the calibration {calibrated}" in shown
    assert "per-tensor evidence: at steps 0, 1, 2, 4, 8, 16" in shown
    assert "fsdp2.ulp" not in shown
