"""Run folders in several passes, as ranks write them."""

import json
from pathlib import Path

import numpy as np
from reader_files import file

STEPS = 12
JOB = {
    "schema": 1,
    "name": "resized",
    "role": "test",
    "identity": "abc",
    "dialect": "titan_0_3",
    "steps": STEPS,
    "parallelism": {"dp_shard": 2},
    "techniques": [],
    "pipeline_schedule": None,
    "cp_rotation": None,
    "train_config": {
        "path": "debug.toml",
        "module": None,
        "config": None,
        "model": {},
        "settings": {},
        "loader": "torchtitan",
    },
    "overrides": {},
    "sample_steps": [0, 1, 6],
    "repeat": None,
    "inject": None,
    "without_fixes": [],
    "segments": [],
    "checkpoint_every": 4,
    "faults": [{"kind": "kill", "step": 7, "rank": 1, "node": 1, "torn": "death"}],
    "elastic_nodes": False,
}


def step(number, **changes):
    return {
        "kind": "step",
        "step": number,
        "loss": 9.0 - number / 8,
        "tokens": 100 + number,
        "batch_digest": f"{number:016x}",
        "batch_agrees": True,
        "seconds": 1.0,
        "at": 1000.0 + number,
        **changes,
    }


def write_pass(folder: Path, number, loaded, lines, *, end=None, header=None, name=None):
    """One pass; without an end its metrics are still called ``metrics.jsonl.part``."""
    head = {
        "schema": 1,
        "kind": "header",
        "identity": "abc",
        "world_size": 2,
        "steps": STEPS,
        "pass": number,
        "segment": None,
        **(header or {}),
    }
    start = [] if loaded is None else [{"kind": "loaded", "step": loaded, "at": 1000.0}]
    last = [] if end is None else [{"kind": "end", "steps": end}]
    text = "".join(json.dumps(line) + "\n" for line in [head, *start, *lines, *last])
    where = folder / "passes" / (name or f"{number:03d}")
    file(where, "metrics.jsonl.part" if end is None else "metrics.jsonl", text)
    return where


def write_job(folder: Path, **changes):
    file(folder, "job.json", json.dumps({**JOB, **changes}))
    return folder


def state_arrays(number, **changes):
    generator = np.random.default_rng(number)
    content = {
        "schema": np.array(1),
        "step": np.array(number),
        "names": np.array(["norm.weight", "output.weight"]),
        "sizes": np.array([8, 64]),
        "parameters_sketch": generator.normal(size=(2, 64)),
        "parameters_norm": np.array([1.0, 2.0]),
        "parameters_zeros": np.array([0, 0]),
        "parameters_not_finite": np.array([0, 0]),
        "state_names": np.array(["exp_avg"]),
        "state_norm": np.array([[0.5], [np.nan]]),
        "state_sketch": np.ones((2, 1, 64)),
        "state_steps": np.array([float(number), np.nan]),
        "lr": np.array(1e-3),
        "trainer_step": np.array(number),
        "tokens_seen": np.array(4096),
        "samples_consumed": np.array(-1),
    }
    return {key: value for key, value in {**content, **changes}.items() if value is not None}


def write_state(folder: Path, event, number, **changes):
    path = folder / "state" / f"{event}-step-{number:08d}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **state_arrays(number, **changes))
    return path
