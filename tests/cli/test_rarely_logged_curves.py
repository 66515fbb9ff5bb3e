"""Programs that log one step in several: judged at these, unless the last is missing."""

import json

import numpy as np
import pytest
from curve_program import EXPERIMENT, PROGRAM, WRONG

from converge_harness.cli import main
from converge_harness.readers.run_folder.run import logged_every

STEPS = 40
RARELY = PROGRAM.replace("range(1, 13)", "range(5, int(sys.argv[3]) + 1, 5)")
"""To the step that its third argument names."""
SETS = (
    EXPERIMENT.replace("steps = 12", f"steps = {STEPS}")
    .replace('"{config.factor}"]', '"{config.factor}", "{config.last}"]')
    .replace("factor = 1.0", f"factor = 1.0\nlast = {STEPS}")
)
CUT = """
[[test]]
name = "cut"
parallelism = {}
set = { last = 20 }
"""


def test_one_step_in_five_is_enough_if_it_goes_to_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(RARELY)
    (tmp_path / "rare.toml").write_text(SETS + WRONG + CUT)
    main(["run", "rare.toml", "--store", "store", "--out", "report"])
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    verdicts = {each["name"]: (each["verdict"], each["cause"]) for each in report["tests"]}
    assert verdicts["again"] == ("PASS", "")
    assert verdicts["doubled"][0] == "FAIL"
    assert verdicts["cut"][0] == "INVALID"
    assert "left 4 of 40 steps, one in 5, up to step 20" in verdicts["cut"][1]
    (note,) = (each for each in report["notes"] if each.startswith("Curves only"))
    assert "one step in 5: nobody saw the others" in note


@pytest.mark.parametrize("rows", ["range(3, 40, 4)", "range(0, 40, 4)", "[*range(0, 40, 9), 39]"])
def test_loggers_may_count_from_0(tmp_path, monkeypatch, rows):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(
        PROGRAM.replace("range(1, 13)", rows).replace("/ step", "/ (step + 1)")
    )
    (tmp_path / "rare.toml").write_text(SETS + WRONG)
    main(["run", "rare.toml", "--store", "store", "--out", "report"])
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {each["name"]: each["verdict"] for each in report["tests"]} == {
        "again": "PASS",
        "doubled": "FAIL",
    }


@pytest.mark.parametrize("written", ['"since the last row"', "5"])
def test_means_of_five_steps_are_judged_as_such(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(RARELY)
    means = (SETS + WRONG).replace("probe = false", f"probe = false\nmean_over = {written}")
    (tmp_path / "means.toml").write_text(means)
    main(["run", "means.toml", "--store", "store", "--out", "report"])
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {each["name"]: each["verdict"] for each in report["tests"]} == {
        "again": "PASS",
        "doubled": "FAIL",
    }
    (note,) = (each for each in report["notes"] if each.startswith("Curves only"))
    assert "one step in 5, and each loss is the mean of the steps since the one before" in note


@pytest.mark.parametrize(
    ("steps", "expected", "every"),
    [
        ((10, 20, 30), 30, 10),
        ((10, 20, 30), 39, 10),
        ((1, 10, 20, 30), 30, 10),
        ((0, 10, 20, 30), 30, 10),
        ((10, 20, 30), 40, 1),  # ended early
        ((10, 30), 30, 1),  # a hole
        ((10, 20, 25), 25, 10),  # and the last step
        ((10, 20, 25), 40, 1),  # ended early
        ((1, 11, 21, 31), 40, 10),
        ((1, 11, 21), 40, 1),  # ended early
        ((0, 4, 8), 12, 4),  # steps 0 to 11
        ((0, 4, 8), 13, 1),  # ended early: 12 is missing
        ((0, 4, 8, 12), 13, 4),
        ((0, 4, 8, 11), 12, 4),
        ((3, 7, 11), 12, 4),
        ((3, 7, 11), 15, 4),
        ((3, 7, 11), 16, 1),  # ended early: 15 is missing
        ((0, 3, 7, 11), 12, 4),
        ((0, 4, 6, 8), 9, 1),  # irregular
        ((5, 15, 25), 30, 1),  # no logger begins there
        ((1, 100), 100, 1),  # nothing but the ends
        ((0, 99), 100, 1),
        ((0, 240), 240, 1),
        ((0, 1, 100), 100, 1),
        ((1, 99, 100), 100, 1),
        ((0, 60), 100, 1),
        ((9, 19), 20, 10),
        ((10,), 10, 1),  # nothing to compare
        ((), 10, 1),
        ((1, 2, 3), 3, 1),
        ((2, 4, 8, 16), 16, 1),
        ((10, 20, 30), None, 1),
    ],
)
def test_how_rarely_a_curve_was_logged(steps, expected, every):
    assert logged_every(np.array(steps, dtype=np.int64), expected) == every
