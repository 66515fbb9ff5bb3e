"""`converge compare` on curves from anywhere: the gates of today pass some of these."""

import json
import math
from pathlib import Path

import pytest

from harness.cli import main

STEPS = 50


def loss(step: int) -> float:
    return 2.0 + 5.0 * math.exp(-step / 10)


def write(path: Path, losses: dict[int, object]) -> Path:
    lines = [json.dumps({"step": step, "loss": value}) for step, value in losses.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def control(tmp_path):
    return write(tmp_path / "control.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})


def judged(control: Path, test: Path, *more: str) -> int:
    return main(["compare", str(control), str(test), "--tolerance", "loss=0.01", *more])


def test_the_same_curve_passes(control, tmp_path):
    same = write(tmp_path / "t.jsonl", {step: loss(step) for step in range(1, STEPS + 1)})
    assert judged(control, same) == 0


@pytest.mark.parametrize(
    "broken",
    [
        {step: 1.049 * loss(step) for step in range(1, STEPS + 1)},
        {step: loss(step) * (100 if step == 30 else 1) for step in range(1, STEPS + 1)},
        dict.fromkeys(range(1, STEPS + 1), "nan"),
        {step: loss(step) if step < STEPS else "nan" for step in range(1, STEPS + 1)},
    ],
    ids=["+4.9%", "one step x100", "all NaN", "NaN last step"],
)
def test_what_other_gates_pass_fails(control, tmp_path, broken):
    assert judged(control, write(tmp_path / "t.jsonl", broken)) == 1


def test_a_run_cut_short_is_undecided(control, tmp_path):
    cut = write(tmp_path / "t.jsonl", {step: loss(step) for step in range(1, STEPS)})
    assert judged(control, cut) == 3


def test_reports_are_written_where_asked(control, tmp_path, capsys):
    test = write(tmp_path / "bad.jsonl", {step: 1.2 * loss(step) for step in range(1, STEPS + 1)})
    folder = tmp_path / "rëports with spaces"
    assert judged(control, test, "--out", str(folder)) == 1
    names = {path.name for path in folder.iterdir()}
    assert {"report.html", "report.md", "report.json", "junit.xml", "plots"} <= names
    report = json.loads((folder / "report.json").read_text())
    assert [test["verdict"] for test in report["tests"]] == ["FAIL"]
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize("tolerance", ["loss", "loss=nan", "loss=-1", "los=0.1"])
def test_a_tolerance_that_is_none_is_refused(control, capsys, tolerance):
    assert main(["compare", str(control), str(control), "--tolerance", tolerance]) == 2
    assert tolerance in capsys.readouterr().err
