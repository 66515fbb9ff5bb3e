"""A control and a test set written as a folder mean the same when they are read there."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.experiment import load_experiment
from converge_harness.matrix.load import plan_experiment
from converge_harness.matrix.pair_files import write_pair
from converge_harness.model import Kind, Launcher, Role
from converge_harness.plan import select
from converge_harness.readers import read_spec
from converge_harness.run_folder.documents import SCHEMA, write_json
from converge_harness.run_folder.layout import JOB
from converge_harness.trainers import assume_toolchain, job_payload

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
BELOW = sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))
OF_THE_FILE = (
    *("seed", "other_seeds", "repeats", "reference", "frozen", "cadence", "stop_after"),
    *("waiting_ranks", "startup_timeout_s", "progress_timeout_s", "cpu_ranks"),
)


@pytest.fixture(autouse=True)
def weights(tmp_path, monkeypatch):
    """What `nox -s upgrade` makes, for the experiment that starts from it."""
    folder = tmp_path / ".converge" / "upgrade_weights"
    folder.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_text("x")
    monkeypatch.chdir(tmp_path)


def called(function):
    return function and function.rpartition("/")[2]


def meaning(spec):
    """A set without what may differ between two files: where its own files lie."""
    settings = spec.trainer.settings
    if settings is not None:
        named = sorted(os.path.normpath(each).rpartition("/")[2] for each in settings.sources)
        settings = replace(settings, folder=Path(), sources=tuple(named))
    return replace(
        spec,
        train_config=replace(spec.train_config, path="", import_from=None, code=None),
        inject=called(spec.inject),
        own_techniques=tuple(
            replace(each, apply=called(each.apply), in_force=called(each.in_force), folder="")
            for each in spec.own_techniques
        ),
        kind=Kind.PARALLEL if spec.kind is Kind.SPACE_TIME else spec.kind,
        waive=tuple(each for each in spec.waive if each != "same-dp-degree"),
        trainer=replace(spec.trainer, settings=settings),
    )


def alone(experiment, name):
    return replace(select(experiment, [name]), anchor=None)


def identities(experiment):
    jobs = plan_experiment(experiment, on_gpu=False, find=assume_toolchain).jobs
    return {job.name: job.identity for job in jobs}


@pytest.mark.parametrize("name", BELOW)
def test_every_set_of_every_experiment_is_written_as_what_it_is(tmp_path, name):
    experiment = load_experiment(EXPERIMENTS / f"{name}.toml")
    kinds = set()
    for spec in experiment.tests:
        if spec.starts_from_control:
            continue
        pair = alone(experiment, spec.name)
        folder = tmp_path / spec.name
        path, *_ = write_pair(pair, "again", folder, "for others")
        again = load_experiment(path)
        assert [meaning(each) for each in again.controls] == [meaning(pair.controls[0])]
        assert [meaning(each) for each in again.tests] == [meaning(pair.tests[0])]
        for key in OF_THE_FILE:
            assert getattr(again, key) == getattr(pair, key), key
        plain = spec.kind is Kind.PARALLEL and spec.trainer.can.techniques  # test_shrinking.py
        if spec.kind not in kinds and not plain:  # one of a kind: a plan takes longer than the rest
            kinds.add(spec.kind)
            here = replace(pair, frozen_sets=None, launcher=Launcher.LOCAL, cluster=None)
            assert identities(again) == identities(here)


def test_a_file_that_is_listed_and_named_by_the_config_is_the_same_pair(tmp_path):
    shutil.copytree(EXPERIMENTS / "recoverable", tmp_path / "recoverable")
    text = (EXPERIMENTS / "recoverable.toml").read_text()
    listed = '[trainer]\nfiles = ["recoverable/train.py", "recoverable/mistakes.py"]\n'
    (tmp_path / "x.toml").write_text(text.replace("[trainer]\n", listed, 1))
    pair = alone(load_experiment(tmp_path / "x.toml"), "resized")
    path, *_ = write_pair(pair, "again", tmp_path / "again", "for others")
    assert "train.py" not in path.read_text().partition("files = ")[2].partition("\n")[0]
    assert identities(load_experiment(path)) == identities(pair)


@pytest.mark.parametrize("name", BELOW)
def test_every_job_is_read_back_as_what_it_is(tmp_path, name):
    experiment = load_experiment(EXPERIMENTS / f"{name}.toml")
    for job in plan_experiment(experiment, on_gpu=False, find=assume_toolchain).jobs:
        if job.role is Role.SEED:
            continue
        folder = tmp_path / job.name
        folder.mkdir(parents=True)
        written = job_payload(job, folder, data=None, seed_checkpoint=None, device="cpu")
        write_json(folder / JOB, {"schema": SCHEMA, **written})
        again = replace(job, spec=read_spec(folder))
        assert job_payload(again, folder, data=None, seed_checkpoint=None, device="cpu") == written
