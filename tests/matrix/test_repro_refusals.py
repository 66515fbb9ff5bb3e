"""What ``converge repro`` cannot write for others, and where files of programs are put."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.errors import ConfigError, StoreError
from converge_harness.experiment import load_experiment
from converge_harness.matrix import repro
from converge_harness.matrix.environment_files import Environment
from converge_harness.matrix.pair_files import pair_files, why_not_for_others, write_files
from converge_harness.plan import select
from converge_harness.toolchains.pinned import Pinned
from converge_harness.trainers.command.settings import RankLauncher

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PROGRAM = """
schema = 1
name = "own"
[trainer]
kind = "command"
command = ["../elsewhere/train.py", "--data={config.data}", "--steps", "{steps}", "--b={config.b}"]
toolchain = "torchtitan-0.3.0"
files = FILES
[trainer.config]
data = "DATA"
b = 1
training = { steps = 2, local_batch_size = 1 }
[control]
name = "one"
parallelism = {}
[[test]]
name = "two"
parallelism = {}
set = { b = 2 }
"""


@pytest.fixture
def write(tmp_path):
    """Load an experiment of a program in another folder, which imports a module beside it."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("import model\n")
    (elsewhere / "model.py").write_text("")
    for name in ("numbers.txt", "run.sh", "train_config.toml"):
        (work / name).write_text(name)

    def written(data="numbers.txt", files=()):
        text = PROGRAM.replace("DATA", data).replace("FILES", str(list(files)))
        (work / "x.toml").write_text(text)
        return load_experiment(work / "x.toml")

    return written


def test_files_of_a_program_keep_their_places_or_get_a_new_one(write):
    files = pair_files(write(files=["run.sh"]), "again", "for others")
    assert list(files) == [
        *("experiment.toml", "train_config.toml", "code/train.py", "code/model.py"),
        *("numbers.txt", "run.sh"),
    ]
    text = files["experiment.toml"].decode()
    assert '"code/train.py",\n    "--data={config.data}"' in text
    assert 'files = [\n    "run.sh",\n]' in text


def test_a_script_can_still_be_started_and_a_folder_that_cannot_be_is_named(tmp_path):
    write_files({"run.sh": b"#!/bin/sh\nexit 3\n", "train.py": b""}, tmp_path / "made")
    assert subprocess.run([tmp_path / "made" / "run.sh"], check=False).returncode == 3
    assert not os.access(tmp_path / "made" / "train.py", os.X_OK)
    with pytest.raises(StoreError, match="cannot write"):
        write_files({"run.sh": b""}, tmp_path / "made" / "train.py")


def test_a_file_with_a_name_of_converges_own_is_refused(write):
    with pytest.raises(ConfigError, match="is a file of the program, and one that converge writes"):
        pair_files(write(files=["train_config.toml"]), "again", "for others")


def test_a_path_in_the_config_that_nobody_else_has_is_refused(write, tmp_path):
    outside = tmp_path / "elsewhere" / "model.py"
    with pytest.raises(
        ConfigError, match=r"a path that nobody else has: put the file below .*/wor"
    ):
        pair_files(write(data=str(outside)), "again", "for others")


def test_a_program_that_only_slurm_starts_is_refused(write):
    experiment = write()

    def by_srun(spec):
        settings = replace(spec.trainer.settings, launcher=RankLauncher.SRUN)
        return replace(spec, trainer=replace(spec.trainer, settings=settings))

    there = replace(
        experiment,
        controls=tuple(map(by_srun, experiment.controls)),
        tests=tuple(map(by_srun, experiment.tests)),
    )
    with pytest.raises(ConfigError, match="'two' is started by srun, which only Slurm has"):
        pair_files(there, "again", "for others")


def test_sets_that_cannot_stand_alone_say_why_and_what_to_do():
    mapped = load_experiment(EXPERIMENTS / "across_frameworks.toml")
    said = str(why_not_for_others(mapped, mapped.tests[0]))
    assert "starts from the weights of a control that another trainer trains" in said
    assert "reproduce a set that [trainer] trains" in said
    faults = select(load_experiment(EXPERIMENTS / "faults.toml"), ["killed"])
    assert why_not_for_others(faults, faults.tests[0]) is None
    nightly = replace(faults, baseline=Path("baselines/nightly"))
    said = str(why_not_for_others(nightly, nightly.tests[0]))
    assert "is judged by a baseline or a calibration file, which nobody else has" in said


def test_an_environment_is_made_once_with_what_it_had(tmp_path):
    made = Environment(
        "env", Pinned("3.12.3", "", ("torch==2.9.0",), ("mine 0.1 was edited",)), True
    )
    assert made.text.splitlines()[1:] == ["# Not here: mine 0.1 was edited.", "torch==2.9.0"]
    commands = list(made.commands())
    assert commands == [
        "[ -x env/bin/python ] || python3.12 -m venv env",
        "env/bin/python -m pip install --quiet -r env.txt",
        "converge toolchain install env/bin/python",
    ]
    (tmp_path / "run.sh").write_text("\n".join(commands))
    subprocess.run(["bash", "-n", str(tmp_path / "run.sh")], check=True)


def test_the_draft_names_only_a_revision_that_was_found(tmp_path):
    found = tmp_path / repro.BISECTED
    with pytest.raises(StoreError, match=r"bisected\.json"):
        repro._found_in(tmp_path, "two")
    found.write_text(json.dumps({"schema": 1, "set": "two", "result": ""}))
    with pytest.raises(ConfigError, match="names no revision that a second run confirmed"):
        repro._found_in(tmp_path, "two")
    found.write_text(json.dumps({"schema": 1, "set": "two", "result": "The first is c8."}))
    assert repro._found_in(tmp_path, "two") == "The first is c8."
    with pytest.raises(ConfigError, match="is of the set 'two', and not of 'three'"):
        repro._found_in(tmp_path, "three")


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("experiment.toml", 'data = "../../srv/team"', "names ../../srv/team, which nobody else"),
        ("experiment.toml", 'c = ["--data=/srv/x/y"]', "names /srv/x/y, which nobody else"),
        ("experiment.toml", 'note = "on node7"', 'has "node7"'),
        ("experiment.toml", 'a = "/data/alice/x.bin"', 'has "/alice"'),
        ("code/train.py", "P = '/scratch/x'", "names /scratch/x, which nobody else"),
        ("env.txt", "mine @ file:///srv/wheels/mine.whl", "names file:///srv/wheels/mine.whl"),
        ("ISSUE.md", "mail alice@node7.cluster.org", 'has "alice@"'),
        ("experiment.toml", 'note = "node77, malice, https://pytorch.org/docs/x"', ""),
        ("code/train.py", "#!/usr/bin/env python\nroot = 'data/x'", ""),
        ("code/train.py", "e = '/usr/bin/env', '/dev/shm/x', '/v1/chat/completions'", ""),
        ("experiment.toml", 'note = "on node7-2"', ""),
        ("env.txt", "torch @ https://download.pytorch.org/whl/torch.whl", ""),
    ],
)
def test_what_names_this_machine_is_pointed_out(tmp_path, monkeypatch, file, text, says):
    monkeypatch.setattr(repro.socket, "gethostname", lambda: "node7.cluster.org")
    monkeypatch.setattr(repro.getpass, "getuser", lambda: "alice")
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    found = list(repro._personal([path], tmp_path))
    assert bool(found) == bool(says), found
    assert not says or any(each.startswith(f"{file} {says}") for each in found), found


def test_a_variable_that_may_be_a_secret_is_pointed_out(tmp_path):
    text = '[trainer]\nenvironment = { HF_TOKEN = "hf_x", NCCL_DEBUG = "INFO" }\nseed_key = "a"\n'
    (tmp_path / "experiment.toml").write_text(text)
    found = list(repro._personal([tmp_path / "experiment.toml"], tmp_path))
    assert found == ["experiment.toml sets HF_TOKEN, which may be a secret"]
