"""The suite for a GPU, as far as a machine without one can ask."""

import json
import subprocess
import sys
from pathlib import Path

from converge_harness.matrix.load import load_plan
from converge_harness.toolchains.find import toolchain_root
from converge_harness.trainers import job_payload

GPU = Path(__file__).parent / "gpu"
EXPERIMENTS = ("kernels.toml", "noise.toml")
MOST_JOBS = 24
"""Of 15 to 20 s each on one GPU: 8 minutes."""


def jobs_of(experiment):
    return load_plan(GPU / experiment, (), on_gpu=False).jobs


def test_the_suite_is_no_larger_than_its_time():
    assert sum(len(jobs_of(each)) for each in EXPERIMENTS) <= MOST_JOBS


def test_torchtitan_takes_every_job_of_the_suite_on_a_gpu(tmp_path):
    """Configs only: they are built where no GPU is, and say what would run on one."""
    files = []
    for experiment in EXPERIMENTS:
        for job in jobs_of(experiment):
            data = tmp_path / "data" if job.spec.train_config.data else None
            document = job_payload(job, tmp_path, data=data, seed_checkpoint=None, device="cuda")
            files.append(tmp_path / f"{experiment}.{job.name}.json")
            files[-1].write_text(json.dumps({"schema": 1, **document}))
    python = toolchain_root() / "torchtitan-0.3.0" / "bin" / "python"
    command = [str(python), "-m", "converge_harness.rank", "--check", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    problems = json.loads(done.stdout.splitlines()[-1])["problems"]
    # torchtitan asks the GPU that is there whether it has Float8.
    assert [
        each for each in problems if "To enable testing on older hardware" not in each["message"]
    ] == []
    refused = {Path(each["job"]).stem.rpartition(".")[2] for each in problems}
    assert refused <= {"float8", "float8_mixed"}


def test_the_program_that_measures_a_step_runs(tmp_path):
    python = toolchain_root() / "torchtitan-0.3.0" / "bin" / "python"
    command = [str(python), str(GPU / "step_cost.py"), str(tmp_path), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert set(json.loads(done.stdout)) == {"plain", "recorded"}


def test_without_a_gpu_the_suite_is_skipped_and_says_so(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(GPU)]
    environment = {"PATH": str(tmp_path), "CONVERGE_NO_SKIPS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert "needs a GPU: nvidia-smi finds none here" in done.stdout
    assert "failed" not in done.stdout
