"""Curves of a real bf16 program: few repeats, and a mistake that moves no step out of its limit."""

import json
import subprocess
from pathlib import Path

import pytest
from cut_down import converge, need
from warm_toolchains import TOOLCHAINS

pytestmark = pytest.mark.slow

TOOLCHAIN = "torchtitan-0.3.0"
REPEATS = ["repeat1", "repeat2", "repeat3"]


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    need(TOOLCHAIN)
    folder = tmp_path_factory.mktemp("curves")
    python = (TOOLCHAINS / TOOLCHAIN / "bin" / "python").absolute()
    program = Path(__file__).with_name("bf16_program.py")
    subprocess.run([python, program, folder], check=True, timeout=600)
    return folder


def compare(curves, name, repeats):
    """The verdict on one of the runs, as report.json has it."""
    given = [f"--repeat={curves / each}.csv" for each in repeats]
    out = curves / f"{name}-{len(repeats)}"
    pair = curves / "control.csv", curves / f"{name}.csv"
    result = converge(curves, "compare", *pair, *given, "--out", out)
    assert (out / "report.json").is_file(), result.stdout + result.stderr
    (test,) = json.loads((out / "report.json").read_text())["tests"]
    return test


def check(test, name):
    (found,) = (each for each in test["checks"] if each["name"] == name)
    return found


def test_a_right_run_passes_with_three_repeats_and_is_open_with_fewer(curves):
    assert compare(curves, "microbatches", REPEATS)["verdict"] == "PASS"
    assert compare(curves, "microbatches", REPEATS[:2])["verdict"] == "INCONCLUSIVE"


def test_a_learning_rate_that_is_off_by_two_percent_shows_in_the_mean_norm_alone(curves):
    """The numbers are those of docs/judging.md.

    A rate that is 1% off moves the mean norm by half as much. On some CPUs the repeats' means are
    so far apart that this is inside (with AMX: 0.006%, where others have 0.001%).
    """
    assert compare(curves, "rate", REPEATS[:2])["verdict"] == "INCONCLUSIVE"
    test = compare(curves, "rate", REPEATS)
    assert test["verdict"] == "FAIL"
    assert test["loss_only_gate"]["passes"]
    failed = {each["name"] for each in test["checks"] if each["outcome"] == "FAIL"}
    assert failed == {"grad-norm-envelope"}
    found = check(test, "grad-norm-envelope")
    assert "though no step is outside" in found["detail"]
    assert 3e-3 < found["measured"] < 4.5e-3
