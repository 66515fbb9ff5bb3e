"""A fast part of the benchmark of bugs: real runs, caught and named as their docstrings say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from two_layers import with_two_layers
from warm_converge import warm_python
from warm_toolchains import warm_toolchains

ROOT = Path(__file__).parents[2]
BUGS = {
    "world_size_factor": "C1",
    "unit_averaged": "C1",
    "gradients_exchanged": "C2",
    "one_replica_clipped": "C3",
    "documents_attend_to_each_other": "C4",
    "norm_squared": "C5",
    "ranks_read_same_data": "C6",
    "parameter_left_out_of_optimizer": "C6",
}
CORRECT = ("ddp2", "fsdp2_accumulation2", "optimizer_for_loop")
STEPS = 4

PROVE = """
import runpy, sys
sys.executable = sys.argv.pop(1)
sys.argv.pop(0)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The script, which calls converge, with the Python that has it imported."""
pytestmark = pytest.mark.slow


def prove(folder: Path, *names: str, steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    where = ("--store", str(folder / "store"), "--out", str(folder / "reports"))
    if not (folder / "benchmarks").exists():
        for name in ("benchmarks/bugs", "train_configs"):
            shutil.copytree(ROOT / name, folder / name)
        with_two_layers(folder)
    script = str(ROOT / "benchmarks" / "prove.py")
    command = [sys.executable, "-c", PROVE, warm_python(), script, "--steps", str(steps), *where]
    return subprocess.run(
        [*command, "--only", *names],
        cwd=folder,
        env={**os.environ, "CONVERGE_TOOLCHAINS": str(warm_toolchains())},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prove")
    return folder, prove(folder, *BUGS, *CORRECT)


def regime_of(folder, result):
    path = folder / "reports" / "benchmark.json"
    assert path.is_file(), result.stdout + result.stderr
    (regime,) = json.loads(path.read_text())["regimes"]
    assert regime["regime"] == "fp32"
    return regime


@pytest.fixture(scope="module")
def document(proven):
    return regime_of(*proven)


def test_every_goal_is_met(proven, document):
    _, result = proven
    missed = [goal for goal in document["goals"] if not goal["met"]]
    assert (result.returncode, missed, document["troubles"]) == (0, [], []), result.stdout


def test_bugs_are_caught_by_step_2_and_named_as_their_docstrings_say(document):
    bugs = {bug["id"]: bug for bug in document["bugs"]}
    assert {name: bug["class"] for name, bug in bugs.items()} == BUGS
    assert [name for name, bug in bugs.items() if bug["first_step"] > 2] == []
    named = {name: bug["sentence"] for name, bug in bugs.items() if bug["cause_right"] is not True}
    assert named == {}
    assert all(bug["steps"] == STEPS and bug["rank_seconds"] > 0 for bug in bugs.values())


def test_correct_set_ups_pass(document):
    verdicts = {each["name"]: each["verdict"] for each in document["correct"]}
    assert verdicts == dict.fromkeys(CORRECT, "PASS")


def test_the_rules_of_elsewhere_judged_the_same_runs(document):
    rules = {rule["name"]: rule for rule in document["rules"]}
    assert rules["converge"]["bugs_caught"] == len(BUGS)
    assert rules["1% at every step"]["bugs_caught"] < len(BUGS)
    assert rules["exact equality"]["false_alarms"] > 0


def test_dropout_that_is_reseeded_at_a_resume_is_named(tmp_path):
    """Beside a right resume, which passes. The published benchmark did not name it."""
    result = prove(tmp_path, "dropout_reseeded", "resumed_with_dropout", steps=8)
    document = regime_of(tmp_path, result)
    (bug,) = document["bugs"]
    assert (bug["id"], bug["verdict"], bug["first_step"]) == ("dropout_reseeded", "FAIL", 6)
    assert bug["cause_right"] is True, bug["sentence"]
    assert "the random numbers (RNG) start over at step 6" in bug["sentence"]
    assert "as they were before step 1" in bug["sentence"]
    verdicts = {each["name"]: each["verdict"] for each in document["correct"]}
    assert verdicts == {"resumed_with_dropout": "PASS"}


def test_page_and_picture_are_there(proven):
    folder, _ = proven
    for kind in ("md", "json", "png", "svg"):
        assert (folder / "reports" / f"benchmark.{kind}").stat().st_size > 1000


def test_a_second_time_nothing_is_run_again(proven):
    folder, _ = proven
    result = prove(folder, "world_size_factor")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "started on" not in result.stdout


def test_an_unknown_name_is_refused_before_anything_runs(tmp_path):
    result = prove(tmp_path, "world_size_fator")
    assert result.returncode == 2
    assert "did you mean 'world_size_factor'" in result.stderr
    assert not (tmp_path / "store").exists()


def test_a_set_of_another_regime_is_refused_with_where_it_is_run(tmp_path):
    result = prove(tmp_path, "float8_tp2")
    assert result.returncode == 2
    assert "float8_tp2 in fp32: is not run: it names a precision of its own" in result.stderr
    assert "is run with Float8" in result.stderr
