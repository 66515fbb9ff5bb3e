"""A real matrix of real torchtitan: no port of its processes can be reached from elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from listening import sampling
from two_layers import with_two_layers
from warm_toolchains import TOOLCHAINS

ROOT = Path(__file__).parents[2]
MATRIX = """
schema = 1
name = "listening"
repeats = []
[trainer]
train_config = "train_configs/llama3_debug.toml"
[trainer.set]
"training.steps" = 4
"training.local_batch_size" = 4
[control]
name = "fsdp2"
waive = ["control-is-repeated"]
parallelism = { dp_shard = 2 }
[[test]]
kind = "fault"
name = "killed"
parallelism = { dp_shard = 2 }
checkpoint_every = 2
restarts = "torchrun"
faults = [{ kind = "kill", step = 3, rank = 1 }]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_port_of_a_real_matrix_is_on_loopback(tmp_path):
    if not (TOOLCHAINS / "torchtitan-0.3.0").is_dir():
        pytest.skip("no toolchain torchtitan-0.3.0: nox -s tests builds it")
    (with_two_layers(tmp_path) / "listening.toml").write_text(MATRIX)
    harness = subprocess.Popen(
        [sys.executable, "-m", "converge_harness", "run", "listening.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CONVERGE_TOOLCHAINS": str(TOOLCHAINS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with sampling(psutil.Process(harness.pid)) as sampled:
        output, _ = harness.communicate()
    logs = [log for log in tmp_path.glob(".converge/runs/killed-*/logs/**/*.log") if log.is_file()]
    said = "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in sorted(logs))
    assert "killed: finished" in output, f"{output}\n{said}"
    assert sampled.on_loopback(), sampled.addresses
    assert set(sampled.folders.values()) == {0o700}
    assert not any(folder.exists() for folder in sampled.folders)
