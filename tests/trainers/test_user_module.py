"""A model module of one's own, found beside the experiment and read without importing it."""

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.trainers import trainer_of_kind

TORCHTITAN = trainer_of_kind("torchtitan")
CODE = """
raise RuntimeError("nobody may import this")
from elsewhere import imported
def tiny(dim: int = 64, *, depth: int): ...
def free(**anything): ...
def _private(): ...
"""


@pytest.fixture
def read(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "llm.py").write_text(CODE)

    def read(text: str):
        (tmp_path / "t.toml").write_text(f"[converge]\n{text}")
        return TORCHTITAN.load_train_config("t.toml", [tmp_path], "x.toml: trainer.train_config")

    return read


def problem(read, text):
    with pytest.raises(ConfigError) as caught:
        read(text)
    (found,) = caught.value.problems
    return str(found)


def test_it_is_found_with_its_folder_and_file(read, tmp_path):
    config = read('module = "mine.llm"\nconfig = "tiny"\narguments = { dim = 32, depth = 2 }')
    assert config.import_from == tmp_path
    assert config.code == tmp_path / "mine" / "llm.py"
    assert config.arguments == {"dim": 32, "depth": 2}


@pytest.mark.parametrize("module", ["llama3", "torchtitan.models.llama3", "installed.model"])
def test_an_installed_module_is_left_to_the_ranks(read, module):
    config = read(f'module = "{module}"\nconfig = "any"')
    assert config.import_from is None
    assert config.code is None


def test_config_registry_goes_before_the_module_itself(read, tmp_path):
    registry = tmp_path / "mine" / "llm" / "config_registry.py"
    registry.parent.mkdir()
    registry.write_text("def small(): ...")
    assert read('module = "mine.llm"\nconfig = "small"').code == registry


def test_what_is_imported_or_takes_anything_may_be_right(read):
    assert read('module = "mine.llm"\nconfig = "imported"').code
    assert read('module = "mine.llm"\nconfig = "free"\narguments = { x = 1 }').code


def test_a_function_that_is_not_there(read, tmp_path):
    said = problem(read, 'module = "mine.llm"\nconfig = "tini"')
    assert f"there is no function 'tini' in {tmp_path / 'mine' / 'llm.py'}" in said
    assert "functions there: tiny, free" in said
    assert "converge.config" in said


def test_an_argument_that_it_does_not_take(read):
    said = problem(
        read, 'module = "mine.llm"\nconfig = "tiny"\narguments = { width = 3, depth = 1 }'
    )
    assert "converge.arguments.width" in said
    assert "tiny(dim: int=64, *, depth: int)" in said


def test_an_argument_that_it_needs(read):
    said = problem(read, 'module = "mine.llm"\nconfig = "tiny"')
    assert "converge.arguments.depth" in said
    assert "is missing" in said


def test_no_python(read, tmp_path):
    (tmp_path / "mine" / "llm.py").write_text("def tiny(:\n")
    said = problem(read, 'module = "mine.llm"\nconfig = "tiny"')
    assert f"is not Python: {tmp_path / 'mine' / 'llm.py'}:1" in said


def test_a_shape_is_for_the_function_to_choose(read):
    said = problem(read, 'module = "mine.llm"\nconfig = "free"\n[converge.model]\ndim = 64')
    assert "cannot reshape a model of one's own" in said
    assert "[converge.arguments]" in said


def test_arguments_without_a_function(read):
    assert "set converge.module" in problem(read, "arguments = { dim = 3 }")


def test_a_module_is_looked_for_beside_the_experiment(tmp_path):
    (tmp_path / "beside.py").write_text("def tiny(): ...")
    (tmp_path / "x.toml").write_text(
        """
schema = 1
[trainer]
train_config = "t.toml"
[control]
name = "c"
parallelism.dp_shard = 2
[[test]]
name = "t"
parallelism = { dp_shard = 2, tp = 2 }
"""
    )
    (tmp_path / "t.toml").write_text(
        '[converge]\nmodule = "beside"\nconfig = "tiny"\n'
        "[training]\nsteps = 3\nlocal_batch_size = 1\nseq_len = 8\n"
    )
    experiment = load_experiment(tmp_path / "x.toml")
    assert experiment.tests[0].train_config.import_from == tmp_path
