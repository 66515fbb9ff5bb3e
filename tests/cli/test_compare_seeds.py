"""`converge compare --seeds` and `--ask "no worse"`: groups of runs, and changes that are meant."""

import json
import math
import random
from pathlib import Path

import pytest

from converge_harness.cli import main

STEPS = 120


def curve(path, seed, factor=1.0):
    chance = random.Random(seed)
    level = 1 + 1e-3 * chance.gauss(0, 1)
    lines = ["step,loss"]
    for step in range(1, STEPS + 1):
        loss = (2 + 5 * math.exp(-step / 20)) * level * factor
        lines.append(f"{step},{loss * (1 + 3e-3 * chance.gauss(0, 1)):.9f}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def sides(tmp_path, monkeypatch):
    """Paths of three seeds each: a control, the same again, one higher and one lower."""
    monkeypatch.setenv("COLUMNS", "200")
    factors = {"control": 1.0, "same": 1.0, "higher": 1.05, "lower": 0.95}
    return {
        name: [
            curve(tmp_path / f"{name}{seed}.csv", 10 * number + seed, factor) for seed in range(3)
        ]
        for number, (name, factor) in enumerate(factors.items())
    }


def compare(sides, *tests, more=("--margin", "0.01")):
    given = [word for name in tests for word in ("--test", *sides[name])]
    return main(["compare", "--seeds", "--control", *sides["control"], *given, *more])


def told(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_groups_are_compared_and_each_seed_is_in_the_report(sides, tmp_path, capsys):
    folder = tmp_path / "out"
    more = ("--margin", "0.01", "--out", str(folder))
    assert compare(sides, "same", "higher", more=more) == 1
    out = told(capsys)
    assert "FAIL higher0: mean loss of 3 seeds +0.0" in out
    assert "the margin is 0.01" in out
    assert "same0, within the margin of 0.01: mean loss of 3 seeds" in out
    assert "Not asked: the loss of single steps" in out
    report = json.loads((folder / "report.json").read_text())
    assert [test["verdict"] for test in report["tests"]] == ["PASS", "FAIL"]
    assert [(each["name"], each["of"]) for each in report["besides"]] == [
        (f"{side}{seed}", f"{side}0") for side in ("control", "same", "higher") for seed in (1, 2)
    ]
    assert report["calibration"] == []
    names = {path.name for path in (folder / "plots").iterdir()}
    assert {"overview.svg", "overview.png"} <= names
    assert not any(name.startswith("differences") for name in names)
    assert "other seed of higher0 **higher1**" in (folder / "report.md").read_text()
    assert "other seed of higher0" in (folder / "report.html").read_text()
    assert "control2, a seed of control0" in (folder / "report.html").read_text()


def test_no_worse_takes_what_is_lower(sides, capsys):
    assert compare(sides, "lower") == 1
    capsys.readouterr()
    more = ("--margin", "0.01", "--ask", "no worse")
    assert compare(sides, "lower", more=more) == 0
    out = told(capsys)
    assert "1 test set: is no worse than the control" in out
    assert "Not asked: the loss of single steps, a loss that is too low" in out
    assert compare(sides, "higher", more=more) == 1


def test_no_worse_of_one_pair(sides, capsys):
    control, lower, higher = (sides[name][0] for name in ("control", "lower", "higher"))
    more = ("--ask", "no worse", "--margin", "0.01")
    assert main(["compare", control, lower, *more]) == 0
    assert "of one seed" in told(capsys)
    assert main(["compare", control, higher, *more]) == 1
    assert main(["compare", control, lower, "--ask", "same", "--margin", "0.01"]) == 1


def test_what_is_open_says_what_would_settle_it(sides, capsys):
    assert compare(sides, "same", more=("--margin", "0.004")) == 3
    out = told(capsys)
    assert "further seeds per side" in out
    assert " would settle it with a probability of 80%" in out
    assert ", would settle" not in out
    assert "next: converge compare --seeds --control" in out
    assert "TEST_4 … --margin 0.004" in out
    assert compare(sides, "same", more=("--margin", "0.002")) == 3
    out = told(capsys)
    assert "too near the margin of 0.002 to say how many further seeds" in out
    assert "next:" not in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--seeds", "--control", "C0", "C1"], "--seeds: is given without --test"),
        (["--seeds", "--test", "T0", "T1"], "--seeds: is given without --control"),
        (["C0", "T0", "--seeds"], "is neither a --control nor a --test of --seeds"),
        (["--control", "C0", "C1", "--test", "T0", "T1"], "names runs of several seeds"),
        ([], "is given no CONTROL"),
        (["C0"], "is given no TEST"),
        (["--seeds", "--control", "C0", "C0", "--test", "T0", "T1"], "is given twice"),
        (["--seeds", "--control", "C0", "C1", "--test", "C0", "T1"], "is given twice"),
        (
            ["--seeds", "--control", "C0", "C1", "--test", "T0", "T1", "--repeat", "T2"],
            "--repeat: has no effect",
        ),
        (["C0", "T0", "--ask", "no worse", "--tolerance", "loss=1"], "has no effect"),
    ],
)
def test_a_mixture_of_forms_is_refused_with_the_command_that_would_do(
    sides, capsys, words, problem
):
    places = {"C": sides["control"], "T": sides["same"]}
    paths = [
        places[word[0]][int(word[1])] if word[0] in places and len(word) == 2 else word
        for word in words
    ]
    assert main(["compare", *paths]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert problem in err
    assert "converge compare" in err or "counts once" in err or "leave it out" in err


def test_a_target_is_asked_of_seeds_with_a_margin(sides, capsys):
    more = ("--target", "loss=2.5", "--margin", "0.2")
    assert compare(sides, "same", more=more) == 0
    assert "loss 2.5 after" in told(capsys)
    assert compare(sides, "higher", more=("--target", "loss=2.11", "--margin", "0.01")) == 1
    capsys.readouterr()
    for wrong, problem in (
        (("--target", "2.5", "--margin", "0.1"), "is not a target loss"),
        (("--target", "loss=low", "--margin", "0.1"), "is not a target loss"),
        (("--target", "loss=2.5"), "needs a margin"),
        (("--target", "loss=2.5", "--margin", "0.1", "--ask", "same"), "no more steps"),
    ):
        assert compare(sides, "same", more=wrong) == 2
        assert problem in " ".join(capsys.readouterr().err.split())
    assert main(["compare", sides["control"][0], sides["same"][0], *more]) == 2
    assert "needs runs of several seeds" in " ".join(capsys.readouterr().err.split())


def test_columns_and_a_first_step_hold_for_every_seed(sides, tmp_path, capsys):
    for name in ("control", "same"):
        for number, path in enumerate(sides[name]):
            text = Path(path).read_text().replace("step,loss", "it,objective")
            other = tmp_path / f"{name}-{number}.csv"
            other.write_text(text)
            sides[name][number] = str(other)
    more = ("--margin", "0.01", "--columns", "step=it", "loss=objective", "--from", "41")
    assert compare(sides, "same", more=more) == 0
    assert "over steps 81 to 120" in told(capsys)


def test_a_damaged_seed_judges_nothing(sides, tmp_path, capsys):
    cut = tmp_path / "cut.csv"
    cut.write_text("\n".join(Path(sides["same"][2]).read_text().split("\n")[:50]) + "\n")
    sides["same"][2] = str(cut)
    assert compare(sides, "same") == 3
    assert "INVALID" in told(capsys)


def test_one_seed_a_side_is_no_sample(sides, capsys):
    sides["same"] = sides["same"][:1]
    assert compare(sides, "same") == 3
    assert "at least 2 per side" in told(capsys)
