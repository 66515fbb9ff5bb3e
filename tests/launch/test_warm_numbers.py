"""Real torchtitan: a forked rank computes the very bits that one started from scratch does."""

import json

import numpy as np
import pytest
from launch_jobs import ROOT
from two_layers import with_two_layers

from converge_harness.launch import RunOptions, run_plan
from converge_harness.matrix.load import load_plan
from converge_harness.matrix.run import prepare_data
from converge_harness.model import RunStatus
from converge_harness.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXPERIMENT = """
schema = 1
name = "warm"
repeats = []

[trainer]
train_config = "train_configs/llama3_debug.toml"
toolchain = "torchtitan-0.3.0"

[trainer.set]
"training.steps" = 3
"training.local_batch_size" = 4
"training.global_batch_size" = 8

[control]
name = "fsdp2"
waive = ["control-is-repeated"]
parallelism = { dp_shard = 2 }

[[test]]
name = "tp2"
waive = ["same-dp-degree"]
parallelism = { tp = 2 }
set = { "training.local_batch_size" = 8 }
"""


def numbers_of(record):
    """All that the probe measured, but for time and memory."""
    lines = [
        json.loads(line) for line in (record.folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        {name: value for name, value in line.items() if name not in ("seconds", "memory_bytes")}
        for line in lines
    ]


def tensors_of(record):
    """Every array of every sampled step, as bytes."""
    found = {}
    for path in sorted((record.folder / "tensors").glob("*.npz")):
        with np.load(path) as arrays:
            found[path.name] = {name: arrays[name].tobytes() for name in arrays.files}
    return found


def test_warm_and_cold_runs_agree_bit_for_bit(toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("CONVERGE_TOOLCHAINS", str(toolchain.python.parents[2]))
    file = with_two_layers(tmp_path) / "warm.toml"
    file.write_text(EXPERIMENT)
    plan = load_plan(file, (), on_gpu=False)
    found = {}
    for warm in (True, False):
        store = Store(tmp_path / f"warm {warm}")
        data = {made: ready.folder for made, ready in prepare_data(plan, store).items()}
        records = run_plan(plan, store, RunOptions(data=data, warm=warm), lambda event: None)
        assert [record.status for record in records] == [RunStatus.FINISHED] * len(plan.jobs)
        kept = [json.loads((record.folder / "record.json").read_text()) for record in records]
        assert {each["warm"] for each in kept} == {warm}
        found[warm] = [
            (numbers_of(record), tensors_of(record))
            for job, record in zip(plan.jobs, records, strict=True)
            if job.role != "seed checkpoint"
        ]
    lines, tensors = found[True][0]
    assert len(lines) == 8  # header, three steps, replicas at steps 0, 1 and 2, end
    assert len(tensors) == 3
    assert found[True] == found[False]
