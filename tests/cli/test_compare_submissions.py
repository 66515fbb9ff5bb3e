"""`converge compare --rcp`: logs of MLPerf Training against reference convergence points."""

import json

import pytest

from converge_harness.cli import main

LENGTHS = (1000, 1010, 1020, 990, 1000, 1030, 980, 1000)


def event(key, value=None, **metadata):
    return ":::MLLOG " + json.dumps({"key": key, "value": value, "metadata": metadata})


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "rcps_llama31_8b.json"
    point = {"Benchmark": "llama31_8b", "BS": 16, "Epochs to converge": LENGTHS}
    path.write_text(json.dumps({"ref_16": point}))
    return str(path)


def submission(folder, *lengths):
    folder.mkdir()
    paths = []
    for number, length in enumerate(lengths):
        lines = [
            event("submission_benchmark", "llama31_8b"),
            event("global_batch_size", 16),
            event("eval_accuracy", 3.3, samples_count=length),
            event("run_stop", status="success"),
        ]
        path = folder / f"result_{number}.txt"
        path.write_text("\n".join(lines) + "\n")
        paths.append(str(path))
    return paths


def test_submissions_are_judged_by_both_rules(table, tmp_path, capsys):
    good = submission(tmp_path / "good", 990, 1000, *[995, 1000] * 4)
    fast = submission(tmp_path / "fast", *[900, 905, 910, 900, 905] * 2)
    late = submission(tmp_path / "late", *[1200, 1210, 1190, 1200, 1200] * 2)
    assert main(["compare", "--rcp", table, "--test", *good]) == 0
    out = capsys.readouterr().out
    assert "1 test set: is no faster than its RCP." in out
    assert "Not asked: lengths above the RCP's." in out
    assert "by MLPerf's rule: mean length 997.5, of the RCP 1,003.33" in out
    assert "multiplies its score by 1.0058" in out
    folder = tmp_path / "report"
    groups = ["--test", *good, "--test", *fast, "--test", *late]
    more = ["--margin", "0.05", "--out", str(folder)]
    assert main(["compare", "--rcp", table, *groups, *more]) == 1
    out = capsys.readouterr().out
    assert "FAIL fast: faster than chance allows" in out
    assert "FAIL late: mean length of 10 runs +0.2" in out
    report = json.loads((folder / "report.json").read_text())
    assert [(each["name"], each["verdict"]) for each in report["tests"]] == [
        ("good", "PASS"),
        ("fast", "FAIL"),
        ("late", "FAIL"),
    ]
    assert "faster than chance allows" in (folder / "report.html").read_text()
    assert main(["compare", "--rcp", table, "--test", *good, good[0]]) == 2
    assert "result_0.txt: is given twice" in "".join(capsys.readouterr().err.split("\n"))


def test_three_logs_of_ten_are_no_submission(table, tmp_path, capsys):
    few = submission(tmp_path / "few", 985, 985, 985)
    assert main(["compare", "--rcp", table, "--test", *few]) == 3
    said = "INVALID few: the submission has 3 runs: MLPerf demands 10 of llama31_8b"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "is given without --test"),
        (("--seeds", "--test", "a"), "--seeds: has no effect"),
        (("--test", "a", "--control", "b"), "b: is not a --test"),
        (("--test", "a", "--tolerance", "loss=1"), "--tolerance: has no effect"),
    ],
)
def test_a_mixture_of_forms_is_a_usage_error(table, capsys, words, said):
    assert main(["compare", "--rcp", table, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
