from pathlib import Path

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment

TRAIN_CONFIG = """
[training]
steps = 20
local_batch_size = 4
global_batch_size = 8
seq_len = 256
mixed_precision_param = "float32"
[converge]
module = "llama3"
config = "llama3_debugmodel"
[converge.model]
n_layers = 4
n_heads = 4
[converge.data]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(TRAIN_CONFIG)
    return tmp_path


@pytest.fixture
def load(folder):
    """Load an experiment from its text."""

    def load(text: str | bytes):
        path = folder / "x.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_experiment(path)

    return load


@pytest.fixture
def problems(load):
    """The problems of an experiment that is wrong, as ``place: message (hint)`` without folders."""

    def problems(text: str | bytes) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text)
        return [str(each).split("x.toml", 1)[-1] for each in caught.value.problems]

    return problems
