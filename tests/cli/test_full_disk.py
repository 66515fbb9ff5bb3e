"""A disk that fills up: exit code 2 before anything was launched, and 3 after it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_disks import small_disk_at

ROOT = Path(__file__).parents[2]
MATRIX = f"""
schema = 1
name = "filling"
repeats = []
[trainer]
kind = "command"
command = ["{{python}}", "train.py", "{{output}}", "{{dp}}"]
launcher = "none"
python = "{sys.executable}"
probe = false
curves = "{{output}}/loss.csv"
[trainer.config]
training = {{ steps = 2, local_batch_size = 2, global_batch_size = 8 }}
[control]
name = "ddp2"
parallelism.dp_replicate = 2
waive = ["control-is-repeated"]
[[test]]
name = "ddp4"
parallelism.dp_replicate = 4
"""
PROGRAM = """
import os, sys
from pathlib import Path

output = Path(sys.argv[1])
(output / "loss.csv").write_text("step,loss\\n1,2.0\\n2,1.0\\n")
if sys.argv[2] == "4":
    disk = os.statvfs(output)
    (output / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_frsize))
"""


@pytest.fixture
def matrix(tmp_path):
    (tmp_path / "e.toml").write_text(MATRIX)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def converge(folder, store):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "converge_harness",
            "run",
            "e.toml",
            "--store",
            store,
            "--out",
            "report",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_disk_that_fills_up_while_jobs_run_is_no_usage_error(matrix):
    with small_disk_at(matrix / "disk", "1m") as disk:
        ended = converge(matrix, disk / "store")
        assert ended.returncode == 3, ended.stdout + ended.stderr
        assert "the disk is full" in ended.stderr
        assert "no verdict; finished runs are kept" in ended.stderr
        assert "nothing was launched" not in ended.stderr


def test_a_disk_that_is_full_before_is_one(matrix):
    with small_disk_at(matrix / "disk", "64k") as disk:
        (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        ended = converge(matrix, disk / "store")
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "the disk is full" in ended.stderr
        assert "no verdict" not in ended.stderr
