"""What commit deebc83 wrote, the last before the redesign, is read and judged as it was then."""

import json

import pytest
from stored_samples import copied, judged, measured

from converge_harness.baselines import read_baseline
from converge_harness.calibrations import find_calibration, read_calibrations
from converge_harness.cli import main
from converge_harness.cli.exit_codes import ExitCode
from converge_harness.errors import StoreError
from converge_harness.model import Judgement, Technique
from converge_harness.readers import read_run, read_spec
from converge_harness.run_folder.documents import SCHEMA


@pytest.fixture
def sample(tmp_path):
    return copied("deebc83", tmp_path)


def run_of(sample, name):
    (folder,) = (sample / "store" / "runs").glob(f"{name}-*")
    return folder


def test_a_report_folder_is_rendered_anew_with_the_same_verdicts_and_numbers(sample):
    before, numbers = judged(sample), measured(sample)
    assert {name: word for name, (word, *_) in before.items()} == {"ddp2": Judgement.PASS}
    (sample / "report" / "report.json").unlink()
    assert main(["report", str(sample / "report")]) == ExitCode.PASS
    after, found = judged(sample), measured(sample)
    for name, (word, cause, onset, checks) in before.items():
        assert after[name][:3] == (word, cause, onset)
        assert checks.items() <= after[name][3].items(), name  # later commits may ask for more
    assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=1e-9, nan_ok=True)


def test_a_run_folder_has_all_its_evidence(sample):
    control = read_run(run_of(sample, "fsdp2"))
    assert control.complete
    assert control.steps.tolist() == [1, 2, 3]
    assert [each.step for each in control.samples] == [0, 1, 3]
    assert not control.problems
    spec = read_spec(run_of(sample, "ddp2"))
    assert (spec.trainer.kind, spec.parallelism.dp_replicate) == ("torchtitan", 2)
    assert Technique.COMPILE not in spec.techniques


def test_a_calibration_file_serves_a_comparison(sample):
    path = sample / "calibration.json"
    (stored,) = read_calibrations(path)
    assert (stored.calibration.control, len(stored.repeats)) == ("fsdp2", 2)
    sets = [str(run_of(sample, name)) for name in ("fsdp2", "ddp2")]
    assert main(["compare", *sets, "--calibration", str(path)]) == ExitCode.PASS


def test_a_baseline_is_whole_and_stands_in_for_its_control(sample, monkeypatch, capsys):
    folder = sample / "baselines" / "small"
    stored = read_baseline(folder)
    assert stored.baseline.text.startswith("baseline small, blessed by ada on ")
    assert stored.learnt == find_calibration([stored.learnt], stored.baseline.identity)
    calibration = str(folder / "calibration.json")
    test = str(run_of(sample, "ddp2"))
    assert main(["compare", str(folder), test, "--calibration", calibration]) == ExitCode.PASS
    experiment = sample / "experiment.toml"
    text = experiment.read_text().replace("repeats =", BY_BASELINE)
    experiment.write_text(text)
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(sample / "none"))
    capsys.readouterr()
    assert main(["plan", str(experiment), "--store", str(sample / "store")]) == ExitCode.PASS
    assert "blessed by ada" in capsys.readouterr().out


BY_BASELINE = 'baseline = "small"\nbaseline_across = ["hardware"]\nrepeats ='


def test_a_baseline_of_a_newer_release_is_refused_in_words(sample):
    path = sample / "baselines" / "small" / "baseline.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": SCHEMA + 1}))
    with pytest.raises(StoreError) as caught:
        read_baseline(path.parent)
    assert f"{path}: written with schema {SCHEMA + 1} by a newer converge" in str(caught.value)
    assert "upgrade converge" in str(caught.value)


def test_a_baseline_that_was_changed_is_refused(sample):
    path = sample / "baselines" / "small" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(StoreError, match="is not the file that ada blessed"):
        read_baseline(path.parent)
