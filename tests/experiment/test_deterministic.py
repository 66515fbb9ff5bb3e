"""``deterministic`` of ``[trainer]``: from the file to the ranks, identities and reports."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.cli import main
from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import InForce, Parallelism, SetSpec, TrainConfig
from converge_harness.report.view.in_force import techniques_of
from converge_harness.trainers.megatron import TRAINER
from converge_harness.trainers.torchtitan import TORCHTITAN

CONFIG = """
[training]
steps = 4
local_batch_size = 1
seq_len = 8
[converge]
module = "llama3"
config = "llama3_debugmodel"
[converge.data]
"""
FILE = """
schema = 1
{top}
[trainer]
train_config = "base.toml"
{trainer}
[control]
parallelism = {{ dp_shard = 2 }}
[[test]]
name = "tp2"
parallelism = {{ dp_shard = 2, tp = 2 }}
"""


@pytest.fixture
def written(tmp_path):
    (tmp_path / "base.toml").write_text(CONFIG)

    def write(trainer="", top=""):
        path = tmp_path / "x.toml"
        path.write_text(FILE.format(trainer=trainer, top=top))
        return path

    return write


def planned(capsys, path):
    assert main(["plan", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_sets_are_deterministic_unless_the_file_says_otherwise(written):
    experiment = load_experiment(written())
    assert all(spec.deterministic for spec in (*experiment.controls, *experiment.tests))
    experiment = load_experiment(written("deterministic = false"))
    assert not any(spec.deterministic for spec in (*experiment.controls, *experiment.tests))


@pytest.mark.parametrize("key", ["debug.deterministic", "training.deterministic"])
def test_the_trainers_own_key_is_refused_with_ours(written, key):
    with pytest.raises(ConfigError, match=r"cannot be set here.*use trainer\.deterministic"):
        load_experiment(written(f'set = {{ "{key}" = false }}'))


def test_another_program_is_told_that_it_chooses_its_kernels_itself(tmp_path):
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "x.toml"
    path.write_text(
        'schema = 1\n[trainer]\nkind = "command"\ncommand = ["train.py"]\ndeterministic = false\n'
        "[trainer.config]\ntraining = { steps = 2, local_batch_size = 1 }\n"
        '[control]\nparallelism = {}\n[[test]]\nname = "t"\nparallelism = {}\n'
    )
    with pytest.raises(ConfigError, match=r"trainer\.deterministic.* is for torchtitan only"):
        load_experiment(path)


def test_it_counts_to_the_identity_only_where_it_is_switched_off(written, capsys):
    plain = planned(capsys, written())
    said = planned(capsys, written("deterministic = true"))
    off = planned(capsys, written("deterministic = false"))
    identities = [{job["name"]: job["identity"] for job in each["jobs"]} for each in (plain, off)]
    assert said["jobs"] == plain["jobs"]
    # Initial weights are drawn by no kernel that the switch is about.
    same = {name for name, identity in identities[0].items() if identities[1][name] == identity}
    assert same == {"seed"}
    assert [each["deterministic"] for each in off["sets"]] == [False, False]


def test_a_plan_advises_reruns_until_there_are_enough(written, capsys):
    assert main(["plan", str(written("deterministic = false"))]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "not deterministic" in told
    assert 'repeats = ["rerun", "rerun.2", "rerun.3", …]' in told
    enough = 'repeats = ["rerun", "rerun.2", "rerun.3", "ulp"]'
    assert main(["plan", str(written("deterministic = false", enough))]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "learnt from its reruns, 3 here" in told
    assert "held against" not in told
    assert main(["plan", str(written())]) == 0
    assert "deterministic" not in capsys.readouterr().out


def test_init_writes_it_with_enough_reruns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(CONFIG)
    words = ["init", "--technique", "tp=2", "--dp", "2", "--base", "base.toml"]
    assert main([*words, "--not-deterministic", "--out", "x.toml"]) == 0
    experiment = load_experiment(Path("x.toml"))
    assert not experiment.controls[0].deterministic
    assert [str(each) for each in experiment.repeats][:3] == ["rerun", "rerun.2", "rerun.3"]
    assert main([*words, "--out", "y.toml"]) == 0
    assert "deterministic" not in Path("y.toml").read_text()


SPEC = SetSpec(
    "t", Parallelism(), TrainConfig("base.toml", {}), "torchtitan-0.3.0", trainer=TORCHTITAN
)


def test_a_trainer_without_such_a_key_is_not_asked_for_it():
    spec = replace(SPEC, deterministic=False, trainer=TRAINER.default_spec())
    seen = InForce(config={"debug.deterministic": True})
    found = spec.trainer.audit.not_in_force(spec, seen)
    assert not [each for each in found if "deterministic" in each]


@pytest.mark.parametrize("named", [True, False])
def test_what_ran_otherwise_than_named_is_not_in_force(named):
    spec = replace(SPEC, deterministic=named)

    def told(ran):
        seen = InForce(config={"debug.deterministic": ran})
        found = TORCHTITAN.audit.not_in_force(spec, seen)
        return [each for each in found if "deterministic" in each]

    assert told(named) == []
    ran = str(not named).lower()
    assert told(not named) == [f"deterministic = {str(named).lower()} is named, {ran} is in force"]


def test_a_report_names_it_beside_the_techniques():
    assert techniques_of(SPEC) == ()
    assert techniques_of(replace(SPEC, deterministic=False)) == ("not deterministic",)
