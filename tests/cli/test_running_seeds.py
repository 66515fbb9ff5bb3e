"""``[seeds]`` and ``ask = "no worse"`` from the file to the report, with a tiny program."""

import json
import sys

import pytest

from converge_harness.cli import main

PROGRAM = """
import random, sys
from pathlib import Path

output, seed, factor, of_first = sys.argv[1:]
chance = random.Random(int(seed))
level = 1 + 0.05 * chance.gauss(0, 1)
factor = float(of_first if seed == "42" else factor)
with (Path(output) / "loss.csv").open("w") as curve:
    curve.write("step,loss\\n")
    for step in range(1, 65):
        loss = (2 + 3 / step) * level * (1 + 1e-3 * chance.gauss(0, 1)) * factor
        curve.write(f"{step},{loss!r}\\n")
"""
EXPERIMENT = f"""
schema = 1
name = "seeds"
seed = 42

[seeds]
count = 3

[trainer]
kind = "command"
command = [
    {json.dumps(sys.executable)}, "train.py", "{{output}}", "{{seed}}", "{{config.factor}}",
    "{{config.of_first}}",
]
launcher = "none"
probe = false
curves = "{{output}}/loss.csv"

[trainer.config]
factor = 1.0
of_first = 1.0
training = {{ steps = 64, local_batch_size = 1 }}

[control]
name = "control"
parallelism = {{}}

[[test]]
name = "same"
parallelism = {{}}
set = {{ factor = 1.00000001 }}

[[test]]
name = "off_by_other_seeds"
parallelism = {{}}
set = {{ factor = 1.05 }}

[[test]]
name = "lower"
ask = "no worse"
margin = 0.01
parallelism = {{}}
set = {{ factor = 0.7, of_first = 0.7 }}

[[test]]
name = "higher"
ask = "no worse"
margin = 0.01
parallelism = {{}}
set = {{ factor = 1.4, of_first = 1.4 }}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    return tmp_path


def test_every_set_is_judged_over_its_seeds(folder, capsys):
    """A fault that only other seeds show is no PASS, and a seed's own level is no difference."""
    assert main(["run", "e.toml", "--out", "out"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    report = json.loads((folder / "out" / "report.json").read_text())
    tests = {test["name"]: test for test in report["tests"]}
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "same": "PASS",
        "off_by_other_seeds": "INCONCLUSIVE",
        "lower": "PASS",
        "higher": "FAIL",
    }
    # The first pair is right, the two others are 5% off: of three, that may be chance.
    over = checks(tests["off_by_other_seeds"])
    assert over["loss-envelope"] == "PASS"
    assert over["loss-same-over-seeds"] == "INCONCLUSIVE"
    assert "mean loss of 3 seeds +0.0" in out
    assert "with more steps, or more seeds" in out
    assert checks(tests["same"])["loss-same-over-seeds"] == "PASS"
    assert "loss-same-over-seeds" not in checks(tests["lower"])
    assert "lower, within the margin of 0.01: mean loss of 3 seeds -0.4" in out
    assert "Not asked of" in out
    others = [(each["name"], each["of"]) for each in report["besides"]]
    assert others == [
        (f"{name}.seed{seed}", name)
        for name in ("control", "same", "off_by_other_seeds", "lower", "higher")
        for seed in (43, 44)
    ]
    assert "other seed of lower" in (folder / "out" / "report.html").read_text()


def test_a_seed_that_crashes_leaves_no_pass(folder, capsys):
    program = PROGRAM.replace(
        "chance = random",
        'if seed == "44" and factor == "0.7": raise SystemExit(3)\nchance = random',
    )
    (folder / "train.py").write_text(program)
    assert main(["run", "e.toml", "--only", "lower", "--out", "out"]) == 3
    report = json.loads((folder / "out" / "report.json").read_text())
    (test,) = report["tests"]
    assert test["verdict"] == "ERROR"
    assert "exit" in test["cause"] or "crashed" in test["cause"]
    capsys.readouterr()


def checks(test):
    return {each["name"]: each["outcome"] for each in test["checks"]}
