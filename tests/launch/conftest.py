"""Plans of tiny jobs (``tiny_rank.py``) under real torchrun, with a toolchain's Python."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import ToolchainError
from harness.launch import RunOptions
from harness.model import (
    Experiment,
    Job,
    Parallelism,
    Plan,
    Precision,
    Role,
    SetSpec,
    Toolchain,
    TrainConfig,
)
from harness.store import Store
from harness.toolchain import find_toolchain

ROOT = Path(__file__).parents[2]
TOOLCHAIN = "torchtitan-0.3.0"


def tiny_job(name, *, ranks=2, steps=3, role=Role.TEST, needs=None, toolchain=None, **overrides):
    spec = SetSpec(
        name=name,
        parallelism=Parallelism(dp_shard=ranks),
        train_config=TrainConfig(path="tiny.toml", settings={}),
        toolchain=TOOLCHAIN,
        overrides={f"tiny.{key}": value for key, value in overrides.items()},
    )
    return Job(
        name=name,
        role=role,
        spec=spec,
        toolchain=toolchain or Toolchain(TOOLCHAIN, Path("/toolchain/bin/python"), "titan_0_3", {}),
        seed=1,
        steps=steps,
        local_batch_size=1,
        global_batch_size=ranks,
        seq_len=8,
        precision=Precision.FP32,
        identity=hashlib.sha256(f"{name} {ranks} {steps} {overrides}".encode()).hexdigest(),
        needs=needs,
    )


def plan_of(*jobs, **timeouts):
    experiment = Experiment(
        name="tiny", path=Path("tiny.toml"), controls=(), tests=(), **timeouts
    )
    return Plan(experiment=experiment, jobs=jobs)


@pytest.fixture(scope="session")
def toolchain():
    try:
        return find_toolchain(
            TOOLCHAIN, Path(os.environ.get("CONVERGE_TOOLCHAINS") or ROOT / ".toolchains").absolute()
        )
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def tiny(toolchain, monkeypatch):
    """Makes tiny jobs that really run."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{Path(__file__).parent}")

    def make(name, **values):
        return replace(tiny_job(name, **values), toolchain=toolchain)

    return make


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "a store")


@pytest.fixture
def cold():
    return RunOptions(warm=False, check=False, rank_module="tiny_rank", grace_s=2.0)
