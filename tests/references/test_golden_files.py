"""A golden's folder: what it keeps, and that nobody changes it unseen."""

import errno
import json
from pathlib import Path

import pytest
from golden_samples import ROUNDING, bless, control_of, experiment

from converge_harness.errors import StoreError
from converge_harness.readers import read_spec
from converge_harness.references import default_folder, find_goldens, read_golden


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    return experiment(tmp_path)


@pytest.fixture
def golden(path):
    folder = path.parent / "baselines" / "g"
    bless(folder, path)
    return folder


def test_what_was_blessed_is_read(path, golden):
    stored = read_golden(golden)
    control = control_of(path)
    assert stored.golden.identity == control.identity
    assert stored.golden.spec.parallelism == control.spec.parallelism
    assert stored.golden.text == "golden g, blessed by ada on 2026-11-22: why"
    assert stored.golden.toolchain.versions["torch"] == "2.12.0"
    assert stored.learnt.calibration.control == "fsdp2"
    assert stored.replaces is None
    assert find_goldens(golden.parent) == (golden,)


def test_no_path_and_host_of_the_machine_is_kept(path, golden):
    kept = (golden / "job.json").read_text() + (golden / "record.json").read_text()
    assert "adas-laptop" not in kept
    assert str(path.parent / "runs") not in kept
    assert read_spec(golden) is not None


def test_goldens_before_are_kept_whole_with_author_and_change(path, golden):
    bless(golden, path, "bob", ROUNDING)
    bless(golden, path, "cid", ROUNDING)
    newest = read_golden(golden)
    assert (newest.golden.blessing.author, newest.replaces.author) == ("cid", "bob")
    assert newest.replaces.change == ROUNDING
    authors = [read_golden(golden / "previous" / n).golden.blessing.author for n in "12"]
    assert authors == ["ada", "bob"]
    assert not [each for each in golden.parent.iterdir() if each != golden]


@pytest.mark.parametrize("name", ["metrics.jsonl", "calibration.json", "tensors/step-00000000.npz"])
def test_a_golden_that_somebody_changed_is_refused(golden, name):
    (golden / name).write_bytes((golden / name).read_bytes() + b" ")
    with pytest.raises(StoreError, match=f"{name} is not the file that ada blessed"):
        read_golden(golden)


@pytest.mark.parametrize(
    "change",
    [{"files": {}}, {"precision": "bf16"}, {"facts": {}}, {"hardware": "gpu"}, {"digest": ""}],
    ids=lambda change: next(iter(change)),
)
def test_a_baseline_that_somebody_edited_is_refused(golden, change):
    document = json.loads((golden / "baseline.json").read_text())
    (golden / "baseline.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(StoreError, match=r"baseline\.json is not the file that ada blessed"):
        read_golden(golden)


@pytest.mark.parametrize("name", ["tensors/step-00000003.npz", "passes/001/metrics.jsonl"])
def test_evidence_that_nobody_blessed_is_refused(golden, name):
    (golden / name).parent.mkdir(parents=True, exist_ok=True)
    (golden / name).write_bytes((golden / "metrics.jsonl").read_bytes())
    with pytest.raises(StoreError, match=f"{name} is not the file that ada blessed"):
        read_golden(golden)


def test_a_golden_survives_a_bless_that_cannot_be_finished(path, golden, monkeypatch):
    rename = Path.rename

    def full(self, target):
        if self.name == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StoreError, match="No space left"):
        bless(golden, path, "bob", ROUNDING)
    assert read_golden(golden).golden.blessing.author == "ada"


def test_a_damaged_or_newer_baseline_is_refused(golden):
    document = json.loads((golden / "baseline.json").read_text())
    (golden / "baseline.json").write_text(json.dumps({**document, "schema": 2}))
    with pytest.raises(StoreError, match="newer converge"):
        read_golden(golden)
    del document["author"]
    (golden / "baseline.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match="author: Field required; bless the control again"):
        read_golden(golden)


def test_a_folder_that_is_none_is_said_to_be_none(tmp_path):
    with pytest.raises(StoreError, match="no golden here"):
        read_golden(tmp_path)


def test_goldens_lie_beside_the_experiments(tmp_path):
    assert default_folder(tmp_path / "experiments" / "e.toml") == tmp_path / "baselines"
    assert default_folder(tmp_path / "e.toml") == tmp_path / "baselines"
