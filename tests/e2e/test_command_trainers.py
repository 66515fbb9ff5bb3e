"""Programs of a user's own by the real command line: right ones pass, and no broken one ever does.

``trainers/curve_trainer.py`` leaves a curve and needs nothing but Python; ``trainers/
probed_trainer.py`` calls the probe, in the environment of a toolchain that has torch, and so does
``trainers/mixed_types_trainer.py``, whose parameters are stored in two types.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_converge import warm_python
from warm_toolchains import warm_torch

ROOT = Path(__file__).parents[2]
TRAINERS = Path(__file__).parent / "trainers"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CURVES = f"""
schema = 1
name = "curves"
repeats = ["rerun"]
[trainer]
kind = "command"
command = [
    "{TRAINERS}/curve_trainer.py", "--steps", "{{steps}}", "--seed", "{{seed}}",
    "--output", "{{output}}", "--bug", "{{config.bug}}",
]
launcher = "none"
python = "{sys.executable}"
probe = false
curves = "{{output}}/loss.csv"
columns = {{ step = "iteration", loss = "train/loss" }}
progress_timeout_s = 10
[trainer.config]
bug = "none"
training = {{ steps = 12, local_batch_size = 1 }}
[control]
name = "one"
parallelism = {{}}
[[test]]
name = "again"
parallelism = {{}}
""".replace("command = [\n", 'command = [\n    "{python}",\n')
CURVES_GONE_WRONG = {
    "rate": ("FAIL", "loss is suddenly off"),
    "nan": ("FAIL", "nan at step 7"),
    "nothing": ("ERROR", "the program ended with 0, but there is no "),
    "raise": ("ERROR", "ValueError: told to raise"),
    "hang": ("ERROR", "nor its ranks' output grew for 10 s"),
    "empty": ("INVALID", "loss.csv: is empty"),
    "other column": ("INVALID", "has no 'train/loss' for loss"),
    "half": ("INVALID", "left 6 of 12 steps"),
    "longer": ("INVALID", "left 24 of 12 steps"),
}
PROBED = f"""
schema = 1
name = "probed"
repeats = ["rerun"]
[trainer]
kind = "command"
command = [
    "{TRAINERS}/probed_trainer.py", "--steps", "{{steps}}", "--seed", "{{seed}}",
    "--batch", "{{local_batch_size}}", "--bug", "{{config.bug}}",
]
toolchain = "torchtitan-0.3.0"
progress_timeout_s = 60
[trainer.config]
bug = "none"
training = {{ steps = 6, local_batch_size = 4, global_batch_size = 4, seq_len = 16 }}
[control]
name = "one"
parallelism = {{}}
[[test]]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
set = {{ training.local_batch_size = 2 }}
"""
PROBED_GONE_WRONG = {
    "no averaging": ("FAIL", "a reduction of these gradients over dp_replicate is missing"),
    "nan": ("FAIL", "nan"),
    "silent": ("ERROR", "its probe recorded no step"),
    "half": ("ERROR", "ended with 0 after step 3 of 6"),
    "raise": ("ERROR", "rank 1: ValueError: told to raise"),
    "hang": (
        "ERROR",
        "after step 2 (progress_timeout_s); a step of a probe ends when every rank has called",
    ),
    "other data": ("FAIL", "trained on other samples than the control at step 1"),
    "other weights": ("INVALID", "starts from other weights than the control"),
    "smaller batch": ("FAIL", "tokens is 32 at step 1, 64 in the control"),
}
MIXED_TYPES = f"""
schema = 1
name = "mixed_types"
repeats = ["ulp", "ulp.2", "ulp.3"]
[trainer]
kind = "command"
command = [
    "{TRAINERS}/mixed_types_trainer.py", "--steps", "{{steps}}", "--seed", "{{seed}}",
    "--global-batch", "{{global_batch_size}}", "--batch", "{{local_batch_size}}",
    "--bug", "{{config.bug}}",
]
toolchain = "torchtitan-0.3.0"
[trainer.config]
bug = "none"
[trainer.config.training]
steps = 6
local_batch_size = 4
global_batch_size = 8
seq_len = 16
dtype = "bfloat16"
[control]
name = "ddp2"
parallelism = {{ dp_replicate = 2 }}
[[test]]
name = "one_rank"
parallelism = {{}}
[[test]]
name = "accumulation"
parallelism = {{ dp_replicate = 2 }}
set = {{ training.local_batch_size = 2 }}
"""
RIGHT_MIXED_TYPES = ("one_rank", "accumulation")
MIXED_TYPES_GONE_WRONG = {
    "half the norms' gradients": (
        "FAIL",
        "all norms (blocks.*.norm.weight and norm.weight) by 0.5",
    ),
    "a matrix stands still": ("FAIL", "blocks.1.up.weight stays as it was"),
    "a norm stands still": ("FAIL", "blocks.1.norm.weight stays as it was"),
    "norms rounded": ("FAIL", "all norms (blocks.*.norm.weight and norm.weight) stay as they were"),
}


def sets(wrong: dict[str, object], more: str) -> str:
    return "".join(f'[[test]]\nname = "{bug}"\n{more % bug}\n' for bug in wrong)


def converge(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            warm_python(),
            "-m",
            "converge_harness",
            *map(str, words),
            "--store",
            str(folder / "store"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "CONVERGE_TOOLCHAINS": str(warm_torch()),
            "CONVERGE_HISTORY": str(folder / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )


def judged(folder: Path, text: str) -> tuple[dict[str, dict], dict, int]:
    """The verdict of every set by name, the whole report, and the exit code."""
    file = folder / "x.toml"
    file.write_text(text)
    done = converge(folder, "run", file, "--out", folder / "out")
    assert "Traceback" not in done.stderr, done.stderr
    report = folder / "out" / "report.json"
    assert report.is_file(), f"{done.stdout}\n{done.stderr}"
    found = json.loads(report.read_text())
    return {test["name"]: test for test in found["tests"]}, found, done.returncode


def require_words(tests: dict[str, dict], wrong: dict[str, tuple[str, str]]) -> None:
    said = {name: (tests[name]["verdict"], tests[name]["cause"]) for name in wrong}
    missed = {
        name: said[name]
        for name, (word, words) in wrong.items()
        if said[name][0] != word or words not in said[name][1]
    }
    assert not missed


def test_curves_of_a_program_are_judged_and_none_that_is_broken_passes(tmp_path):
    wrong = sets(CURVES_GONE_WRONG, 'parallelism = {}\nset = { bug = "%s" }')
    tests, report, code = judged(tmp_path, CURVES + wrong)
    assert code == 1
    assert tests["again"]["verdict"] == "PASS"
    require_words(tests, CURVES_GONE_WRONG)
    assert any("Gradients, weights" in note for note in report["notes"])


def test_a_control_without_the_mapped_column_judges_nothing(tmp_path):
    tests, _, code = judged(tmp_path, CURVES.replace("train/loss", "lm loss"))
    assert code == 3
    assert tests["again"]["verdict"] == "INVALID"
    assert "has no 'lm loss' for loss" in tests["again"]["cause"]


def test_what_only_torchtitan_can_do_is_refused_in_words(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(CURVES)
    bless = ("bless", file, "--name", "n", "--author", "a", "--reason", "r", "--out", tmp_path)
    for words in (bless, ("plan", file, "--dry-run")):
        done = converge(tmp_path, *words)
        assert done.returncode == 2, done.stdout
        assert "trainer.kind" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_probed_program_has_all_tiers_and_none_that_is_broken_passes(tmp_path):
    two = "parallelism = { dp_replicate = 2 }\n"
    wrong = sets(PROBED_GONE_WRONG, two + 'set = { training.local_batch_size = 2, bug = "%s" }')
    tests, report, _ = judged(tmp_path, PROBED + wrong)
    good = tests["ddp2"]
    assert good["verdict"] == "PASS", good["cause"]
    unseen = {each["name"] for each in good["checks"] if each["outcome"] == "SKIPPED"}
    assert unseen <= {"loss-equivalent", "buffers-first-steps", "buffers-envelope"}
    require_words(tests, PROBED_GONE_WRONG)
    assert not any("not probed" in note for note in report["notes"])


def test_parameters_of_two_types_are_judged_each_by_its_own(tmp_path):
    wrong = sets(MIXED_TYPES_GONE_WRONG, 'parallelism = {}\nset = { bug = "%s" }')
    tests, _, code = judged(tmp_path, MIXED_TYPES + wrong)
    assert code == 1
    right = {name: (tests[name]["verdict"], tests[name]["cause"]) for name in RIGHT_MIXED_TYPES}
    assert {verdict for verdict, _ in right.values()} == {"PASS"}, right
    require_words(tests, MIXED_TYPES_GONE_WRONG)
