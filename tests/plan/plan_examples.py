"""Toolchains, surroundings and a planner from TOML text, for the tests beside this file."""

from dataclasses import replace
from pathlib import Path

import pytest

from converge_harness.errors import ConfigError
from converge_harness.experiment import load_experiment
from converge_harness.model import Launcher, Plan, Surroundings, SyntheticData, Toolchain
from converge_harness.plan import make_plan

TITAN_03 = Toolchain(
    name="torchtitan-0.3.0",
    python=Path("/toolchain/bin/python"),
    dialect="titan_0_3",
    versions={"torch": "2.13.0", "torchtitan": "0.3.0", "converge-harness": "0.1.0"},
)
TITAN_02 = replace(
    TITAN_03,
    name="torchtitan-0.2.2",
    dialect="titan_0_2",
    versions={"torch": "2.13.0", "torchtitan": "0.2.2", "converge-harness": "0.1.0"},
)
TITAN_MAIN = replace(
    TITAN_03,
    name="torchtitan-main",
    dialect="titan_main",
    versions={
        "torch": "2.15.0",
        "torchtitan": "0.2.2+gb5bcd76c66d0",  # as main calls itself
        "converge-harness": "0.1.0",
    },
)
SURROUNDINGS = Surroundings(
    hardware="cpu-x86_64 Test",
    rank_code="r1",
    data={SyntheticData(): "d1", SyntheticData(seed=2): "d2"},
)
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
n_kv_heads = 2
[converge.data]
"""
HEAD = """
schema = 1
[trainer]
train_config = "base.toml"
"""
CLUSTER = """
[cluster]
ranks_per_node = 4
"""
CONTROL = """
[control]
parallelism = { dp_shard = 2 }
"""


class Planner:
    """Plans from TOML text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "base.toml").write_text(TRAIN_CONFIG)

    def text(
        self,
        text: str,
        surroundings: Surroundings = SURROUNDINGS,
        toolchains: tuple[Toolchain, ...] = (TITAN_02, TITAN_03),
        launcher: Launcher | None = None,
    ) -> Plan:
        path = self.folder / "x.toml"
        path.write_text(text)
        return make_plan(
            load_experiment(path, launcher=launcher),
            {each.name: each for each in toolchains},
            surroundings,
        )

    def sets(self, tests: str, *, control: str = CONTROL, trainer: str = "", **options) -> Plan:
        return self.text(HEAD + trainer + control + tests, **options)

    def test_set(self, body: str, **options) -> Plan:
        return self.sets(f'[[test]]\nname = "t"\n{body}\n', **options)

    def refused(self, body: str, **options) -> list[str]:
        """Why a plan with this one test set is refused."""
        with pytest.raises(ConfigError) as caught:
            self.test_set(body, **options)
        return [str(each).split("x.toml: ", 1)[-1] for each in caught.value.problems]
