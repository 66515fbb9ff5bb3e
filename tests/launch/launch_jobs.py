"""Jobs and plans for tests of the launcher."""

import hashlib
from pathlib import Path

from converge_harness.model import (
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

ROOT = Path(__file__).parents[2]
TOOLCHAIN = "torchtitan-0.3.0"


def tiny_job(
    name,
    *,
    ranks=2,
    steps=3,
    role=Role.TEST,
    needs=None,
    toolchain=None,
    techniques=(),
    **overrides,
):
    spec = SetSpec(
        name=name,
        parallelism=Parallelism(dp_shard=ranks),
        train_config=TrainConfig(path="tiny.toml", settings={}),
        toolchain=TOOLCHAIN,
        techniques=techniques,
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


def plan_of(*jobs, **limits):
    experiment = Experiment(name="tiny", path=Path("tiny.toml"), controls=(), tests=(), **limits)
    return Plan(experiment=experiment, jobs=jobs)
