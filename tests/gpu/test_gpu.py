"""The suite for one GPU: ``nox -s gpu``.

Real Float8, bfloat16, compile, CUDA graphs and activation checkpointing, with deterministic kernels
and with those of production; what the probe costs a step, and that nothing in a step waits for the
device. Then every parallelism, and a bug of torchtitan's, by ranks that share the GPU over NCCL.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from converge_harness.cli import main
from converge_harness.toolchains.find import toolchain_root
from converge_harness.trainers.environment import SHARE_GPUS

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent.parent / "experiments"
DEAREST_STEP = 1.5
"""How many times as long a step that is not sampled may take; a first guess."""


def gpus():
    """The names of the GPUs of this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run(
        [program, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


if not gpus():
    pytest.skip("needs a GPU: nvidia-smi finds none here", allow_module_level=True)


def report_of(folder, experiment, *options):
    arguments = ["run", str(HERE / experiment), "--store", str(folder / "store"), *options]
    code = main([*arguments, "--out", str(folder / "report")])
    return code, json.loads((folder / "report" / "report.json").read_text())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("kernels"), "kernels.toml")


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("noise"), "noise.toml")


@pytest.mark.parametrize(
    "name", ["without_cuda_graphs", "compile", "checkpointed", "bf16", "float8"]
)
def test_a_kernel_of_production_agrees_with_its_control(kernels, name):
    _, report = kernels
    (found,) = [each for each in report["tests"] if each["name"] == name]
    assert (found["verdict"], found["cause"]) == ("PASS", "")


def test_a_rerun_of_deterministic_kernels_is_bit_identical(kernels):
    _, report = kernels
    reruns = [
        repeat
        for calibration in report["calibration"]
        for repeat in calibration["repeats"]
        if repeat["repeat"] == "rerun"
    ]
    assert reruns
    assert all(repeat["bit_identical"] for repeat in reruns)


def test_reruns_of_other_kernels_are_what_test_sets_are_judged_by(noise):
    code, report = noise
    assert code == 0, report["headline"]
    assert report["control"]["deterministic"] is False
    (calibration,) = report["calibration"]
    assert len(calibration["repeats"]) == 3
    assert not calibration["problems"]
    sys.stdout.write(json.dumps(calibration["repeats"], indent=1))


@pytest.fixture
def shared(monkeypatch):
    """Ranks share the GPU: every test below would need 4 or 8 of them."""
    monkeypatch.setenv(SHARE_GPUS, "1")


def test_every_parallelism_agrees_over_nccl(shared, tmp_path):
    code, report = report_of(tmp_path, EXPERIMENTS / "smoke.toml")
    verdicts = {each["name"]: each["verdict"] for each in report["tests"]}
    assert code == 0, verdicts
    assert set(verdicts.values()) == {"PASS"}
    assert {"fsdp2_tp2", "fsdp2_pp2_1f1b", "fsdp2_cp2", "fsdp2_tp2_pp2"} <= set(verdicts)


def test_a_bug_of_a_release_is_found_in_its_module(shared, tmp_path):
    """torchtitan pull request 4245: experts add their bias once per TP rank."""
    names = ("gpt_oss_tp2", "gpt_oss_tp2_mended")
    _, report = report_of(tmp_path, EXPERIMENTS / "models.toml", "--only", *names)
    broken, mended = sorted(report["tests"], key=lambda each: each["name"])
    assert (broken["verdict"], broken["onset_step"]) == ("FAIL", 1)
    assert broken["module"] == "layers.0.moe.routed_experts.inner_experts"
    assert (mended["verdict"], mended["cause"]) == ("PASS", "")


def step_cost(folder, *options):
    python = toolchain_root() / "torchtitan-0.3.0" / "bin" / "python"
    command = [str(python), str(HERE / "step_cost.py"), str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_in_a_step_waits_for_the_device(tmp_path):
    step_cost(tmp_path, "--strict")


def test_what_a_step_costs_with_the_probe(tmp_path):
    found = step_cost(tmp_path)
    sys.stdout.write(json.dumps(found))
    assert found["recorded"] < DEAREST_STEP * found["plain"]
