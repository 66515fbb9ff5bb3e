"""Sets that a program cannot be told to run: named in the plan and in the report."""

import json
import sys

import pytest
from curve_program import PROGRAM

from converge_harness.cli import main
from converge_harness.cli.exit_codes import ExitCode

EXPERIMENT = """
schema = 1
repeats = []
[trainer]
kind = "command"
command = ["{python}", "program.py", "{output}/curve.csv", "1.0", "{dp_replicate}",
    "{local_batch_size}", "{global_batch_size}"]
python = "PYTHON"
launcher = "none"
probe = false
curves = "{output}/curve.csv"
[trainer.config]
training = { steps = 12, local_batch_size = 4, global_batch_size = 8 }
[control]
name = "right"
parallelism = { dp_replicate = 2 }
waive = ["control-is-repeated"]
[[test]]
kind = "space_time"
name = "st"
product = 4
local_batch_size = 2
"""
RESIZED = """
[[test]]
kind = "elastic"
name = "resized"
segments = [{ until = 4, dp_replicate = 2 }, { until = 12, dp_replicate = 1 }]
"""
SHARDED = {"st_fsdp4_acc1", "st_fsdp2_acc2"}


def test_sets_that_are_left_out_are_named_with_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("PYTHON", sys.executable))
    main(["plan", "e.toml", "--json"])
    planned = json.loads(capsys.readouterr().out)["left_out"]
    why = "nothing passes {dp_shard} to the program"
    names = [name for name, each in planned.items() if each == why]
    assert set(names) >= SHARDED
    main(["run", "e.toml", "--store", "store", "--out", "report"])
    printed = capsys.readouterr()
    notes = json.loads((tmp_path / "report" / "report.json").read_text())["notes"]
    said = f"eft out: {', '.join(names)}: {why}"
    assert f"l{said}" in " ".join((printed.out + printed.err).split())
    assert f"L{said}." in notes


@pytest.mark.parametrize(
    ("more", "code", "verdict"),
    [("", ExitCode.PASS, "PASS"), (RESIZED, ExitCode.UNDECIDED, "INVALID")],
)
def test_a_set_that_the_file_asks_for_is_not_passed_over(
    tmp_path, monkeypatch, capsys, more, code, verdict
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("PYTHON", sys.executable) + more)
    assert main(["run", "e.toml", "--store", "store", "--out", "report"]) == code
    said = " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["verdict"] == verdict
    found = {test["name"]: test for test in report["tests"]}
    assert ("left out, so INVALID in the report: resized: 'elastic' needs" in said) is bool(more)
    if more:
        resized = found["resized"]
        assert (resized["verdict"], resized["kind"]) == ("INVALID", "elastic")
        assert resized["cause"].startswith(
            "left out: 'elastic' needs checkpoints, and nothing says where the program writes them"
        )
        assert "1 INVALID" in report["headline"]
        junit = (tmp_path / "report" / "junit.xml").read_text()
        assert '<testsuite name="resized" tests="1" errors="1"' in junit
        capsys.readouterr()
        # The report says the same when it is judged again, and so does the history.
        assert main(["report", "report"]) == code
        assert main(["history", "e", "--history", "store/history.sqlite"]) == ExitCode.PASS
        assert "resized" in capsys.readouterr().out


def test_a_program_without_a_sequence_length_is_counted_in_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "program.py").write_text(PROGRAM)
    text = EXPERIMENT.replace("PYTHON", sys.executable)
    for length, unit in (("", "samples/step"), (", seq_len = 32", "tokens/step")):
        (tmp_path / "e.toml").write_text(text.replace("= 8 }", f"= 8{length} }}"))
        main(["plan", "e.toml"])
        assert unit in capsys.readouterr().out
