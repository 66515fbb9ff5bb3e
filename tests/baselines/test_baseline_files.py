"""A baseline's folder: what it keeps, and that nobody changes it unseen."""

import errno
import json
from pathlib import Path

import pytest
from baseline_samples import EXPERIMENT, ROUNDING, bless, control_of, experiment, plan_of

from converge_harness.baselines import (
    default_folder,
    find_baselines,
    read_baseline,
    require_no_passes,
)
from converge_harness.errors import ConfigError, StoreError
from converge_harness.matrix.bless import control_alone, folders_of
from converge_harness.readers import read_spec
from converge_harness.store import Store


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(tmp_path / "none"))
    return experiment(tmp_path)


@pytest.fixture
def baseline(path):
    folder = path.parent / "baselines" / "g"
    bless(folder, path)
    return folder


def test_what_was_blessed_is_read(path, baseline):
    stored = read_baseline(baseline)
    control = control_of(path)
    assert stored.baseline.identity == control.identity
    assert stored.baseline.spec.parallelism == control.spec.parallelism
    assert stored.baseline.text == "baseline g, blessed by ada on 2026-11-22: why"
    assert stored.baseline.toolchain.versions["torch"] == "2.12.0"
    assert stored.learnt.calibration.control == "fsdp2"
    assert stored.replaces is None
    assert find_baselines(baseline.parent) == (baseline,)


def test_no_path_and_host_of_the_machine_is_kept(path, baseline):
    kept = (baseline / "job.json").read_text() + (baseline / "record.json").read_text()
    assert "adas-laptop" not in kept
    assert str(path.parent / "runs") not in kept
    assert read_spec(baseline) is not None


def test_baselines_before_are_kept_whole_with_author_and_change(path, baseline):
    bless(baseline, path, "bob", ROUNDING)
    bless(baseline, path, "cid", ROUNDING)
    newest = read_baseline(baseline)
    assert (newest.baseline.blessing.author, newest.replaces.author) == ("cid", "bob")
    assert newest.replaces.change == ROUNDING
    authors = [read_baseline(baseline / "previous" / n).baseline.blessing.author for n in "12"]
    assert authors == ["ada", "bob"]
    assert not [each for each in baseline.parent.iterdir() if each != baseline]


@pytest.mark.parametrize("name", ["metrics.jsonl", "calibration.json", "tensors/step-00000000.npz"])
def test_a_baseline_that_somebody_changed_is_refused(baseline, name):
    (baseline / name).write_bytes((baseline / name).read_bytes() + b" ")
    with pytest.raises(StoreError, match=f"{name} is not the file that ada blessed"):
        read_baseline(baseline)


@pytest.mark.parametrize(
    "change",
    [{"files": {}}, {"precision": "bf16"}, {"facts": {}}, {"hardware": "gpu"}, {"digest": ""}],
    ids=lambda change: next(iter(change)),
)
def test_a_baseline_that_somebody_edited_is_refused(baseline, change):
    document = json.loads((baseline / "baseline.json").read_text())
    (baseline / "baseline.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(StoreError, match=r"baseline\.json is not the file that ada blessed"):
        read_baseline(baseline)


@pytest.mark.parametrize("name", ["tensors/step-00000003.npz", "passes/001/metrics.jsonl"])
def test_evidence_that_nobody_blessed_is_refused(baseline, name):
    (baseline / name).parent.mkdir(parents=True, exist_ok=True)
    (baseline / name).write_bytes((baseline / "metrics.jsonl").read_bytes())
    with pytest.raises(StoreError, match=f"{name} is not the file that ada blessed"):
        read_baseline(baseline)


def test_a_baseline_survives_a_bless_that_cannot_be_finished(path, baseline, monkeypatch):
    rename = Path.rename

    def full(self, target):
        if self.name == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StoreError, match="No space left"):
        bless(baseline, path, "bob", ROUNDING)
    assert read_baseline(baseline).baseline.blessing.author == "ada"


def test_a_damaged_or_newer_baseline_is_refused(baseline):
    document = json.loads((baseline / "baseline.json").read_text())
    (baseline / "baseline.json").write_text(json.dumps({**document, "schema": 2}))
    with pytest.raises(StoreError, match="newer converge"):
        read_baseline(baseline)
    del document["author"]
    (baseline / "baseline.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match="author: Field required; bless the control again"):
        read_baseline(baseline)


def test_a_folder_that_is_not_a_baseline_is_named(tmp_path):
    with pytest.raises(StoreError, match="no baseline here"):
        read_baseline(tmp_path)


def test_baselines_lie_beside_the_experiments(tmp_path):
    assert default_folder(tmp_path / "experiments" / "e.toml") == tmp_path / "baselines"
    assert default_folder(tmp_path / "e.toml") == tmp_path / "baselines"


def test_a_control_that_comes_in_passes_is_refused_before_it_trains(tmp_path):
    whole = plan_of(experiment(tmp_path, "checkpoint_every = 2\n" + EXPERIMENT)).experiment
    with pytest.raises(ConfigError, match="checkpoint_every: lets the control leave"):
        control_alone(whole, None)
    assert control_alone(plan_of(experiment(tmp_path)).experiment, None)


def test_a_control_whose_evidence_is_in_passes_is_refused_before_it_trains(path, tmp_path):
    store, plan = Store(tmp_path / "store"), plan_of(path)
    folders = folders_of(plan, store)
    require_no_passes(folders)  # none is there
    assert {each.name[:5] for each in folders} == {"fsdp2"}
    (folders[-1] / "passes").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"is in passes.*run the control again with --fresh"):
        require_no_passes(folders)
