"""Base configs and toolchains for the tests beside this file."""

from pathlib import Path

from converge_harness.experiment import load_experiment
from converge_harness.experiment.tables import CP_ROTATIONS, PIPELINE_SCHEDULES
from converge_harness.guide import parse_factors, recommend, sized_base, write_experiment
from converge_harness.model import Surroundings, SyntheticData, Toolchain
from converge_harness.plan import make_plan
from converge_harness.trainers import trainer_of_kind

load_train_config = trainer_of_kind("torchtitan").load_train_config

VARIANTS = {"pp": PIPELINE_SCHEDULES, "cp": CP_ROTATIONS}
TITAN_03 = Toolchain(
    name="torchtitan-0.3.0",
    python=Path("/toolchain/bin/python"),
    dialect="titan_0_3",
    versions={"torch": "2.13.0", "torchtitan": "0.3.0"},
)
TITAN_02 = Toolchain(
    name="torchtitan-0.2.2",
    python=Path("/toolchain/bin/python"),
    dialect="titan_0_2",
    versions={"torch": "2.13.0", "torchtitan": "0.2.2"},
)
TOOLCHAINS = {each.name: each for each in (TITAN_03, TITAN_02)}
SURROUNDINGS = Surroundings(hardware="H100", rank_code="r1", data={SyntheticData(): "d1"})
WIDE = """
[training]
steps = 20
local_batch_size = {local}
global_batch_size = {budget}
seq_len = 8192
{rest}
"""
EXPERTS_03 = '[converge]\nmodule = "qwen3"\nconfig = "qwen3_moe_debug"\n[converge.data]\n'
EXPERTS_02 = '[model]\nname = "deepseek_v3"\nflavor = "debugmodel"\n'
LLAMA_03 = '[converge]\nmodule = "llama3"\nconfig = "llama3_8b"\n'
LLAMA_02 = '[model]\nname = "llama3"\nflavor = "8B"\n'


def config(folder, rest=LLAMA_03, *, local=1, budget=-1):
    """A train config of this text, read; with a local batch that holds no pipeline unless given."""
    (folder / "base.toml").write_text(WIDE.format(local=local, budget=budget, rest=rest))
    return load_train_config("base.toml", [folder], "--base")


def based(folder, techniques, dp=4, **options):
    """The base that `converge init` would use for some techniques, and these."""
    read = config(folder, **options)
    named = parse_factors([techniques], VARIANTS)
    return sized_base(read, TITAN_03 if read.module else TITAN_02, dp, named), named


def planned(folder, text):
    """The plan of an experiment's text, as `converge plan` makes it."""
    (folder / "made.toml").write_text(text)
    return make_plan(load_experiment(folder / "made.toml"), TOOLCHAINS, SURROUNDINGS)


def written(folder, techniques, dp=4, **options):
    """The text of `converge init` and the sets in it."""
    base, named = based(folder, techniques, dp, **options)
    sets = recommend(base, named)
    return write_experiment(base, named, sets, name=None, train_config="base.toml"), sets
