"""Run folders of a user's own program: a curve by its path and columns, or why there is none."""

import json
import shutil
from pathlib import Path

import pytest
from reader_files import file

from converge_harness.model import Precision, RunStatus
from converge_harness.readers import read_run, read_spec
from converge_harness.trainers.command.settings import RankLauncher

CURVE = "iteration,train/loss\n1,4.0\n2,2.0\n3,1.0\n"
COLUMNS = {"step": "iteration", "loss": "train/loss"}


def run_folder(folder, curve=CURVE, columns=COLUMNS, dtype="float32", **command):
    """A folder as the launcher makes it; ``curve`` None: the program left none."""
    job = {
        "schema": 1,
        "name": "ddp2",
        "role": "test",
        "identity": "abc",
        "dialect": "command",
        "run_folder": str(folder),
        "seed": 42,
        "steps": 3,
        "parallelism": {"dp_replicate": 2, "dp_shard": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1},
        "techniques": [],
        "pipeline_schedule": None,
        "cp_rotation": None,
        "train_config": {
            "path": "x.toml",
            "module": None,
            "config": None,
            "model": {},
            "settings": {"training": {"steps": 3, "dtype": "float16"}},
        },
        "overrides": {"training.dtype": dtype},
        "data": None,
        "sample_steps": [],
        "inject": None,
        "without_fixes": [],
        "repeat": "rerun",
        "command": {
            "argv": ["train.py"],
            "launcher": "mpirun",
            "probed": False,
            "curves": f"{folder}/output/loss.csv",
            "columns": columns,
            "environment": {},
            "folder": "/lab",
            **command,
        },
    }
    file(folder, "job.json", json.dumps(job))
    if curve is not None:
        file(folder, "output/loss.csv", curve)
    return folder


def test_the_curve_of_a_program_is_read_by_its_columns(tmp_path):
    run = read_run(run_folder(tmp_path / "ddp2-abc"))
    assert list(run.signals["loss"]) == [4.0, 2.0, 1.0]
    assert (run.name, run.identity, run.repeat) == ("ddp2", "abc", "rerun")
    assert (run.expected_steps, run.complete, run.in_force) == (3, True, None)
    assert run.source == str(tmp_path / "ddp2-abc")


def test_a_folder_that_was_moved_has_its_curve_along(tmp_path):
    folder = run_folder(tmp_path / "here")
    shutil.move(folder, tmp_path / "there")
    assert read_run(tmp_path / "there").steps.size == 3


def test_the_data_type_of_the_config_is_that_of_the_run(tmp_path):
    assert read_run(run_folder(tmp_path, dtype="bfloat16")).precision is Precision.BF16
    assert read_run(run_folder(tmp_path)).precision is Precision.FP32
    assert read_run(run_folder(tmp_path, dtype="float16")).precision is Precision.BF16
    assert read_run(run_folder(tmp_path, dtype="float8")).precision is Precision.FLOAT8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"curve": None}, "loss.csv: does not exist"),
        ({"curve": ""}, "loss.csv: is empty"),
        ({"curve": "step,accuracy\n1,0.5\n", "columns": {}}, "no loss among"),
        ({"columns": {"loss": "lm loss"}}, "has no 'lm loss' for loss"),
        ({"curve": "iteration,train/loss\n1,4.0\n2,3,4\n"}, "3 cells"),
        ({"curves": "/elsewhere/loss.csv"}, "may be the curve of another run"),
        ({"probed": True}, ""),
    ],
)
def test_what_cannot_be_read_is_reported_and_breaks_nothing(tmp_path, changes, words):
    run = read_run(run_folder(tmp_path, **changes))
    assert not run.complete
    assert all(words in problem for problem in run.problems)
    assert run.status is RunStatus.FINISHED
    assert run.expected_steps == 3


def test_how_a_program_was_called_is_part_of_what_was_planned(tmp_path):
    spec = read_spec(run_folder(tmp_path))
    assert spec.trainer.settings.launcher is RankLauncher.MPIRUN
    assert (spec.trainer.settings.probed, spec.trainer.settings.folder) == (False, Path("/lab"))
