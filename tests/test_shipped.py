"""Examples of converge's own, written into a folder of somebody's."""

import tomllib
from pathlib import Path

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.shipped import examples, shipped, write_example

ROOT = Path(__file__).parents[1]


def test_every_experiment_is_an_example_with_a_sentence():
    found = examples()
    folder = ROOT / "experiments"
    assert set(found) == {
        str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.toml")
    }
    assert all(len(what) > 20 for what in found.values())
    assert found["tutorial/broken"] == (
        "A change to the script that no loss curve shows: this has to fail (docs/tutorial.md)"
    )


@pytest.mark.parametrize("name", sorted(examples()))
def test_an_example_can_be_loaded_where_it_was_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    out = Path(f"{Path(name).name}.toml")
    written = write_example(name, out)
    assert all(path.is_file() for path in written)
    if name != "upgrade":  # needs a checkpoint, which a script makes
        assert load_experiment(out).name == tomllib.loads(out.read_text())["name"]


def test_writing_again_changes_nothing_and_other_content_is_not_overwritten(tmp_path):
    out = tmp_path / "mine" / "smoke.toml"
    first = write_example("smoke", out)
    assert first == (out, tmp_path / "mine" / "train_configs" / "llama3_debug.toml")
    assert write_example("smoke", out) == first
    first[1].write_text("# mine\n")
    with pytest.raises(ConfigError, match=r"llama3_debug.toml: is there already"):
        write_example("smoke", out)
    assert first[1].read_text() == "# mine\n"
    write_example("smoke", out, force=True)
    assert first[1].read_text() == shipped("train_configs/llama3_debug.toml").read_text()


@pytest.mark.parametrize("name", ["smok", "../pyproject", "/etc/hosts", ""])
def test_an_unknown_example_is_refused_with_those_there(tmp_path, name):
    with pytest.raises(ConfigError, match="is not an example") as caught:
        write_example(name, tmp_path / "x.toml")
    assert "--example list" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_module_that_a_train_config_names_comes_too(tmp_path):
    written = write_example("models", tmp_path / "models.toml")
    assert tmp_path / "tiny_models.py" in written


def test_a_folder_is_not_replaced_by_an_example(tmp_path):
    with pytest.raises(ConfigError, match="is there already"):
        write_example("smoke", tmp_path, force=True)


def test_the_data_that_an_experiment_names_come_too(tmp_path):
    write_example("rl", tmp_path / "rl.toml")
    modules = {"grpo", "mistakes", "objective", "policy", "rollouts"}
    wanted = {f"{name}.py" for name in modules} | {"rollouts.jsonl"}
    assert {path.name for path in (tmp_path / "rl").iterdir()} == wanted
    frozen = (ROOT / "experiments" / "rl" / "rollouts.jsonl").read_bytes()
    assert (tmp_path / "rl" / "rollouts.jsonl").read_bytes() == frozen
