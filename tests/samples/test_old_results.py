"""Results of earlier releases stay readable, and are judged as they were."""

import json
from pathlib import Path

import jsonschema
import pytest
from stored_samples import NAMES, copied, judged, measured

from converge_harness.calibrations import read_calibrations
from converge_harness.cli import main
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.readers import read_run
from converge_harness.report import __file__ as report_package
from converge_harness.run_folder.documents import SCHEMA

REWRITTEN = ("report.html", "report.md", "junit.xml", "report.json", "plots/overview.png")


@pytest.fixture(params=NAMES)
def sample(request, tmp_path):
    return copied(request.param, tmp_path)


def test_every_schema_up_to_the_present_one_has_a_sample():
    assert [f"schema{number}" for number in range(1, SCHEMA + 1)] == list(NAMES)


def test_an_old_report_folder_is_rendered_anew_with_the_same_verdicts(sample):
    before, numbers = judged(sample), measured(sample)
    (sample / "report" / "report.json").unlink()
    assert main(["report", str(sample / "report")]) == ExitCode.FAIL
    after = judged(sample)
    assert {word for word, *_ in after.values()} == {"PASS", "FAIL", "ERROR"}
    for name, (word, cause, onset, checks) in before.items():
        assert after[name][:3] == (word, cause, onset)
        assert checks.items() <= after[name][3].items(), name  # later releases may ask for more
    found = measured(sample)
    assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=1e-9, nan_ok=True)
    assert all((sample / "report" / name).stat().st_size for name in REWRITTEN)


def test_old_run_folders_keep_their_evidence(sample):
    runs = {folder.name.rpartition("-")[0]: folder for folder in (sample / "store/runs").iterdir()}
    control = read_run(runs["fsdp2"])
    assert control.steps.tolist() == [1, 2, 3, 4]
    assert [each.step for each in control.samples] == [0, 1, 3]
    assert control.samples[1].post_step.states == ("exp_avg", "exp_avg_sq")
    resumed = read_run(runs["dp_2_1"])
    assert [each.loaded_step for each in resumed.passes] == [0, 2]
    assert resumed.passes[1].loaded.step == resumed.passes[0].saved[0].step == 2
    assert read_run(runs["crashed"]).error.message == "RuntimeError: this set crashes on purpose"


def test_an_old_calibration_serves_a_comparison(sample, capsys):
    (learnt,) = read_calibrations(sample / "report" / "calibration.json")
    assert learnt.calibration.control == "fsdp2"
    runs = sample / "store" / "runs"
    sets = [str(next(runs.glob(f"{name}-*"))) for name in ("fsdp2", "ddp2")]
    calibration = str(sample / "report" / "calibration.json")
    assert main(["compare", *sets, "--calibration", calibration]) == ExitCode.PASS, capsys


def test_an_old_report_for_programs_fits_the_published_schema(sample):
    schema = json.loads((Path(report_package).parent / "report.schema.json").read_text())
    jsonschema.validate(json.loads((sample / "report" / "report.json").read_text()), schema)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("report/matrix.json", "report"),
        ("report/calibration.json", "compare"),
        ("store/runs/fsdp2-*/record.json", "compare"),
        ("store/runs/fsdp2-*/job.json", "compare"),
    ],
)
def test_a_file_of_a_newer_release_is_refused_in_words(sample, name, command, capsys):
    (path,) = sample.glob(name)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": SCHEMA + 1}))
    control, test = (str(next((sample / "store/runs").glob(f"{n}-*"))) for n in ("fsdp2", "ddp2"))
    calibration = str(sample / "report" / "calibration.json")
    arguments = {
        "report": ["report", str(sample / "report")],
        "compare": ["compare", control, test, "--calibration", calibration],
    }
    assert main(arguments[command]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert str(path) in told
    assert f"written with schema {SCHEMA + 1} by a newer converge" in told
    assert "upgrade converge" in told
