"""Dry runs of torchtitan 0.3 against real runs, and what they find wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import titan_0_3_jobs as jobs
from warm_ranks import warm_python

jobs.require_titan_0_3()

MODEL = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512}
EMPTY_STAGE = {
    "model": MODEL | {"n_layers": 4},
    "pp": 2,
    "cp": 2,
    "pipeline_schedule": "Interleaved1F1B",
    "rank": 4,
}
MEASURED = Path(__file__).with_name("measured_tensors.py")


def dry_run(folder, rank=0, *, cold=False, **changes):
    """What the rank side prints, from a process of its own; ``cold``: started as by converge."""
    path = jobs.write_job(folder, **changes)
    done = subprocess.run(
        [
            sys.executable if cold else warm_python("titan_0_3"),
            "-m",
            "converge_harness.rank",
            "--dry-run",
            str(path),
            "--rank",
            str(rank),
        ],
        cwd=jobs.ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_bytes_are_those_of_a_real_run_on_every_pipeline_rank(tmp_path):
    degrees = {"dp_shard": 2, "pp": 2, "pipeline_schedule": "1F1B"}
    runs = jobs.Runs(tmp_path)
    runs.run("real", inject=f"{MEASURED}:measure", **degrees)
    counts = 0
    for rank in (0, 2):
        found = dry_run(tmp_path / f"dry{rank}", rank, **degrees)
        real = json.loads((tmp_path / "real" / f"bytes-{rank}.json").read_text())
        assert found["problems"] == found["sharding_problems"] == []
        assert found["stages"] == [rank // 2]
        assert found["parameters"]["count"] == real["count"]
        for kind in ("parameters", "gradients", "optimizer_states"):
            assert found[kind]["bytes"] == real[kind], kind
        assert found["activations"]["how"].startswith("traced")
        assert found["activations"]["bytes"] > 0
        counts += real["count"]
    assert counts == found["parameters"]["of_model"]


@pytest.mark.slow
def test_a_gpu_job_of_four_dimensions_has_real_float8_layers(tmp_path):
    found = dry_run(
        tmp_path / "job",
        rank=8,
        cold=True,
        device="cuda",
        techniques=["compile", "float8", "async_tp"],
        model=MODEL | {"n_layers": 6},
        tp=2,
        cp=2,
        pp=2,
        pipeline_schedule="Interleaved1F1B",
    )
    assert found["problems"] == found["sharding_problems"] == []
    assert found["world_size"] == 16
    assert found["stages"] == [1, 3]
    assert found["async_tp"] is True
    # Stages 1 and 3 of 6 layers, embedding and output over 4 stages: layers 1, 2 and 5.
    assert found["compiled_blocks"] == 3
    assert found["float8_modules"] == 3 * 5
    assert found["activations"]["how"].startswith("traced")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tp": 4}, "parallelism.tp"),  # 2 heads of keys and values
        # Of 4 layers none is left for the last of 4 stages, which rank 4 of 8 holds.
        (EMPTY_STAGE | {"spmd_backend": "partial_dtensor"}, "parallelism.pp"),
        ({"overrides": {"training.seq_lenn": 64}}, "training.seq_lenn"),
    ],
)
def test_what_does_not_build_is_a_problem_with_its_key(tmp_path, changes, key):
    found = dry_run(tmp_path / "job", **changes)
    assert [problem["key"] for problem in found["problems"]] == [key]
    assert "peak_bytes" not in found
