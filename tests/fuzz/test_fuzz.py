"""A small part of ``nox -s fuzz``, always the same cases, and that its questions are sharp."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from curve_formats import ALL, file_of
from fuzzed_curves import LIMITS, relate
from fuzzing import Case, Ended, called, told
from run_fuzz import KINDS, main, run_case

SEED = 2026
NUMBERS = {"experiments": 8, "stores": 6, "kills": 2}
HERE = Path(__file__).parent


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_cases_of_every_kind(kind, tmp_path):
    if kind.removeprefix("curves.") in ("tensorboard", "wandb"):
        pytest.importorskip(kind.removeprefix("curves."))
    bases = {}
    for number in range(NUMBERS.get(kind, 5)):
        assert run_case(kind, number, SEED, tmp_path, tmp_path / "kept", bases) == []


ROWS = [(step, {"loss": 2 + 1 / step, "grad_norm": 1.0}) for step in range(1, 13)]


def changed(at, **values):
    rows = [(step, dict(known)) for step, known in ROWS]
    rows[at][1].update(values)
    return rows


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ROWS, "same"),
        ([*ROWS[:4], ROWS[3], *ROWS[4:]], "same"),
        (ROWS[::-1], "same"),
        (changed(3, loss=ROWS[3][1]["loss"] * 1.002), "differs"),
        (changed(3, loss=ROWS[3][1]["loss"] * 1.0002), "open"),
        (changed(3, grad_norm=1.03), "differs"),
        (changed(3, loss=math.nan), "differs"),
        (changed(3, grad_norm=math.inf), "differs"),
        (changed(3, loss=None), "differs"),
        (changed(3, grad_norm=None), "differs"),
        ([*ROWS, (4, {"loss": 9.0})], "differs"),
        (ROWS[:5] + ROWS[6:], "differs"),
        (ROWS[1:], "differs"),
        (ROWS[:-1], "differs"),
        ([(step + 1, values) for step, values in ROWS], "differs"),
        ([(step, {"loss": values["loss"]}) for step, values in ROWS], "open"),
        ([row for row in ROWS if row[0] % 3 == 0 or row[0] == 1], "open"),
        (None, "differs"),
    ],
)
def test_what_a_change_of_a_curve_comes_to(rows, expected):
    assert relate(ROWS, rows, LIMITS["alone"]) == expected


@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.read_back])
def test_what_a_format_holds_is_read_back(name, tmp_path):
    written = ALL[name]
    places = min(4, written.places or 4)
    rows = [(step, {s: round(1.5 / step, places) for s in written.signals}) for step in range(1, 8)]
    path = written.write(tmp_path, rows)
    assert written.read_back(file_of(path).read_bytes()) == rows
    assert written.read_back(b"\xff\xfe") is None


@pytest.fixture
def case(tmp_path):
    (tmp_path / "case").mkdir()
    return Case("experiments", 0, 1, tmp_path / "case")


@pytest.mark.parametrize(
    ("ended", "word"),
    [
        (Ended(3, "", "said"), "exit code 3"),
        (Ended("ValueError", "", ""), "exit code ValueError"),
        (Ended(0, "", "Traceback (most recent call last):"), "Traceback"),
        (Ended(2, "", " \n"), "no word about exit code 2"),
        (Ended(0, "\x1b[2J", ""), "prints"),
        (Ended(0, "\u202e", ""), "prints"),
    ],
)
def test_what_no_command_may_do_is_reported(case, ended, word):
    told(case, ("plan",), ended, {0, 2})
    assert word in case.wrong[0]


def test_what_escapes_a_command_and_what_takes_too_long_is_reported(case, monkeypatch):
    def loop(_arguments):
        while True:
            pass

    monkeypatch.setattr("fuzzing.CPU_S", 0.05)
    monkeypatch.setattr("fuzzing.main", loop)
    assert called(case, ("plan",), {0}).code.startswith("more than 0.05 s of CPU")
    monkeypatch.setattr("fuzzing.main", lambda _arguments: 1 / 0)
    assert called(case, ("plan",), {0}).code == "ZeroDivisionError"
    assert len(case.wrong) == 3  # two exit codes, a traceback


def test_a_case_that_goes_wrong_is_kept_with_the_command_that_repeats_it(tmp_path, monkeypatch):
    curves = KINDS["curves.csv"]
    monkeypatch.setattr("fuzzed_curves.relate", lambda *_: "differs")  # so a copy may not pass
    keep, bases = tmp_path / "keep", {}
    numbers = [
        number for number in range(8) if run_case("curves.csv", number, SEED, tmp_path, keep, bases)
    ]
    assert numbers
    assert curves is KINDS["curves.csv"]
    kept = keep / f"seed-{SEED}" / f"curves.csv-{numbers[0]}"
    text = (kept / "case.txt").read_text()
    assert f"nox -s fuzz -- --seed {SEED} --only curves.csv:{numbers[0]}" in text
    assert "PASS of a curve that differs" in text
    assert "$ converge compare" in text
    assert (kept / "files" / "control").is_dir()


def test_a_session_runs_in_processes_of_its_own_and_sums_up(tmp_path):
    words = ["--seed", "1", "--cases", "experiments=1", "curves.jsonl=2", "--keep", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, HERE / "run_fuzz.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1: 3 cases" in done.stdout
    assert "curves.jsonl" in done.stdout
    assert "0 wrong" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("words", [["--cases", "curve=1"], ["--only", "curves.csv"]])
def test_an_unknown_kind_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert "curves.csv" in str(ended.value.code) + capsys.readouterr().err
