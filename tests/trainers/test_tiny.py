"""A trainer that no file of ``harness/`` knows runs a matrix by being registered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TRAINER

from converge_harness.cli.main import main
from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import Launcher
from converge_harness.trainers import kinds, register, trainer_of_document
from converge_harness.trainers.registry import _installed, trainer_of_kind

HERE = Path(__file__).parent
HARNESS = HERE.parents[1] / "harness"
START = (
    "from converge_harness.trainers import register; register('tiny', 'tiny'); "
    "from converge_harness.cli.main import main; raise SystemExit(main())"
)
TOP = """schema = 1
[trainer]
kind = "tiny"
rate = 0.2
[trainer.config]
training = { steps = 20, local_batch_size = 4, global_batch_size = 8 }
mistake = "none"
[control]
name = "two"
parallelism = { dp_shard = 2 }
"""
SETS = """
[[test]]
name = "four"
parallelism = { dp_shard = 4 }
set = { training.local_batch_size = 2 }
[[test]]
name = "summed"
parallelism = { dp_shard = 2 }
set = { mistake = "scale" }
[[test]]
name = "dead"
parallelism = { dp_shard = 2 }
set = { mistake = "dies" }
"""


def converge(folder, *words):
    return subprocess.run(
        [sys.executable, "-c", START, *map(str, words)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HARNESS.parent / "src"), str(HERE))),
            "CONVERGE_STORE": str(folder / "store"),
            "CONVERGE_HISTORY": str(folder / "history.sqlite"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "x.toml").write_text(TOP + SETS)
    done = converge(folder, "run", "x.toml", "--out", "out")
    assert (folder / "out" / "report.json").is_file(), f"{done.stdout}\n{done.stderr}"
    return folder, done


def test_a_registered_trainer_runs_a_matrix_end_to_end(matrix):
    folder, done = matrix
    assert done.returncode == 1, done.stderr
    report = json.loads((folder / "out" / "report.json").read_text())
    tests = {test["name"]: test for test in report["tests"]}
    assert tests["four"]["verdict"] == "PASS", tests["four"]["cause"]
    assert tests["summed"]["verdict"] == "FAIL", tests["summed"]["cause"]
    assert tests["dead"]["verdict"] == "ERROR"
    assert "RuntimeError: as told" in json.dumps(tests["dead"])


def test_its_runs_are_found_again_and_judged_from_their_report(matrix):
    folder, _ = matrix
    (run,) = (folder / "store" / "runs").glob("four-*")
    document = json.loads((run / "job.json").read_text())
    assert (document["trainer"], document["dialect"]) == ("tiny", "tiny")
    began = (run / "curve.csv").stat().st_mtime_ns
    assert converge(folder, "run", "x.toml", "--out", "out").returncode == 1
    assert (run / "curve.csv").stat().st_mtime_ns == began
    assert converge(folder, "report", "out").returncode == 1


def test_a_curve_that_was_changed_afterwards_is_no_evidence(matrix):
    folder, _ = matrix
    (run,) = (folder / "store" / "runs").glob("four-*")
    curve = run / "curve.csv"
    right = curve.read_text()
    assert "curve.csv" in json.loads((run / "record.json").read_text())["evidence"]
    curve.write_text(right.replace("1,", "1,9", 1))
    assert converge(folder, "report", "out").returncode != 0
    report = json.loads((folder / "out" / "report.json").read_text())
    (four,) = (test for test in report["tests"] if test["name"] == "four")
    assert four["verdict"] == "INVALID", four["cause"]
    assert "curve.csv was changed after the run had finished" in json.dumps(four)
    assert converge(folder, "run", "x.toml", "--out", "out").returncode == 1
    assert curve.read_text() == right


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("bless", "x.toml", "--name", "n", "--author", "a", "--reason", "r"), "is tiny"),
        (("submit", "x.toml"), "but a tiny trainer runs on this machine only"),
        (
            ("plan", "x.toml", "--dry-run"),
            "is 'tiny': a dry run can only build models of 'torchtitan'",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_words(tmp_path, monkeypatch, capsys, words, why):
    register("tiny", "tiny")
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(TOP + SETS)
    assert main(words) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_its_table_is_its_own(tmp_path):
    register("tiny", "tiny")
    register("tiny", "tiny")  # again is no mistake
    assert kinds()[:2] == ("torchtitan", "command")
    assert trainer_of_kind("tiny") is TRAINER
    assert trainer_of_document({"trainer": "tiny"}) is TRAINER
    path = tmp_path / "x.toml"
    path.write_text(TOP + SETS)
    control = load_experiment(path).controls[0]
    assert (control.trainer.kind, control.trainer.settings.rate) == ("tiny", 0.2)
    path.write_text(TOP.replace("rate", "raet") + SETS)
    with pytest.raises(ConfigError, match=r"trainer\.raet: unknown key \(did you mean 'rate'"):
        load_experiment(path)
    path.write_text(TOP.replace("rate = 0.2", 'command = ["x"]') + SETS)
    with pytest.raises(ConfigError, match="is a key of kind 'command'; this trainer is of kind"):
        load_experiment(path)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            '[[test]]\nname = "x"\nkind = "elastic"\nsegments = [{ until = 2 }, { until = 20 }]',
            "kind",
        ),
        ('[[test]]\nname = "x"\nparallelism = {}\ntechniques = ["compile"]', "techniques"),
        ('[[test]]\nname = "x"\nparallelism = {}\nown_random_numbers = true', "own_random_numbers"),
    ],
)
def test_sets_that_it_cannot_train_are_refused(tmp_path, more, words):
    register("tiny", "tiny")
    path = tmp_path / "x.toml"
    path.write_text(f'{TOP}[[test]]\nname = "x"\n{more}')
    with pytest.raises(ConfigError, match=words):
        load_experiment(path)


def test_no_scheduler_runs_it(tmp_path):
    register("tiny", "tiny")
    path = tmp_path / "x.toml"
    path.write_text(TOP + SETS)
    with pytest.raises(ConfigError, match="a tiny trainer runs on this machine only"):
        load_experiment(path, launcher=Launcher.SLURM)


def test_a_call_whose_exit_code_is_unknown_was_ended(tmp_path):
    script = tmp_path / "slurm.log"
    script.write_text("step 3\n")
    assert TRAINER.error([], [], None, script).message == "was ended: step 3"
    assert TRAINER.error([], [], 4, script).message == "ended with exit code 4: step 3"


def test_another_trainer_of_a_name_is_refused():
    with pytest.raises(ValueError, match=r"already converge_harness\.trainers"):
        register("command", "tiny")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs distributions that declare a trainer each: kind, module."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution, kind, module):
        metadata = tmp_path / f"{distribution}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[converge.trainers]\n{kind} = {module}\n")
        _installed.cache_clear()

    yield install
    monkeypatch.undo()
    _installed.cache_clear()
    trainer_of_kind.cache_clear()


def test_an_installed_package_declares_its_trainer(installed):
    installed("one", "from-elsewhere", "tiny")
    assert trainer_of_kind("from-elsewhere") is TRAINER
    assert kinds()[-1] == "from-elsewhere"
    installed("ours", "command", "tiny")
    assert trainer_of_kind("command") is not TRAINER
    with pytest.raises(KeyError, match="nobodys"):
        trainer_of_kind("nobodys")


def test_two_packages_with_a_trainer_of_one_kind_are_refused(installed):
    installed("one", "contested", "tiny")
    installed("two", "contested", "other")
    with pytest.raises(ConfigError, match="two installed distributions declare it"):
        trainer_of_kind("contested")


def test_no_file_of_the_harness_knows_it():
    assert not [path for path in HARNESS.rglob("*.py") if '"tiny"' in path.read_text()]
