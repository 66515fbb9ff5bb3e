"""Train configs: ours is taken out, the rest is kept as it is."""

import pytest

from converge_harness.errors import ConfigError
from converge_harness.model import SyntheticData
from converge_harness.trainers import trainer_of_kind

load_train_config = trainer_of_kind("torchtitan").load_train_config


@pytest.fixture
def read(tmp_path):
    def read(text: str):
        (tmp_path / "t.toml").write_text(text)
        return load_train_config("t.toml", [tmp_path], "x.toml: trainer.train_config")

    return read


def test_foreign_tables_are_kept_verbatim(read):
    config = read(
        """
hf_assets_path = "./assets"
[converge]
module = "llama3"
config = "llama3_debugmodel"
[converge.model]
dim = 64
[converge.data]
seed = 3
[training]
steps = 4
[[optimizer.param_groups]]
optimizer_kwargs = { lr = 4e-3 }
"""
    )
    assert config.settings == {
        "hf_assets_path": "./assets",
        "training": {"steps": 4},
        "optimizer": {"param_groups": [{"optimizer_kwargs": {"lr": 4e-3}}]},
    }
    assert (config.path, config.module, config.config) == ("t.toml", "llama3", "llama3_debugmodel")
    assert config.model == {"dim": 64}
    assert config.data == SyntheticData(seed=3)


def test_nothing_of_ours_means_the_trainers_own_data_and_model(read):
    config = read("[training]\nsteps = 1\n")
    assert (config.module, config.config, config.data) == (None, None, None)
    assert config.model == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("converge = 3", "converge: must be a table"),
        ("[converge]\nmodul = 'a'", r"converge\.modul: unknown key \(did you mean 'module'"),
        ("[converge.model]\nlayers = 3", r"converge\.model\.layers: unknown key .*n_layers"),
        ("[converge.data]\nseeds = 3", r"converge\.data\.seeds: unknown key .*'seed'"),
        ("[converge.data]\nseed = '3'", r"converge\.data\.seed: must be a whole number, not '3'"),
        ("[converge.model]\ndim = 0", r"converge\.model\.dim: must be greater than or equal to 1"),
        ("[training]\nwhen = 1979-05-27", r"training\.when: dates and times are not supported"),
    ],
)
def test_a_wrong_table_of_ours_is_refused(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_missing_train_config_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_train_config("no.toml", [tmp_path], "x.toml: trainer.train_config")
    assert str(caught.value) == (
        f"x.toml: trainer.train_config: there is no train config 'no.toml' (looked in: {tmp_path})"
    )
