"""Jobs and plans for tests of the launcher."""

import hashlib
from dataclasses import replace
from pathlib import Path

from converge_harness.model import (
    Experiment,
    Job,
    Parallelism,
    Plan,
    Precision,
    Recovery,
    Role,
    Segment,
    SetSpec,
    Toolchain,
    TrainConfig,
)
from converge_harness.trainers.torchtitan import TORCHTITAN

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
        trainer=TORCHTITAN,
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


def elastic(job, *segments):
    """Of ``(until, ranks)`` each."""
    made = tuple(Segment(until, Parallelism(dp_shard=ranks), 1) for until, ranks in segments)
    spec = replace(job.spec, segments=made, parallelism=made[0].parallelism)
    return replace(job, spec=spec, steps=made[-1].until)


def broken(job, *faults, **values):
    recovery = Recovery(faults, **{"checkpoint_every": 2, "within_s": 60.0, **values})
    return replace(job, spec=replace(job.spec, recovery=recovery))


def plan_of(*jobs, **limits):
    experiment = Experiment(name="tiny", path=Path("tiny.toml"), controls=(), tests=(), **limits)
    return Plan(experiment=experiment, jobs=jobs)
