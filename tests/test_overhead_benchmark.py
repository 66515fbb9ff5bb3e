"""What the benchmark derives from finished runs; its measurements are its own business."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "benchmarks" / "overhead.py"


@pytest.fixture(scope="module")
def overhead():
    spec = importlib.util.spec_from_file_location("overhead", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["overhead"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["overhead"]


def leave_run(store, name, role, started, status="finished"):
    folder = store / "runs" / f"{name}-123456789abc"
    folder.mkdir(parents=True)
    job = {
        "name": name,
        "role": role,
        "run_folder": str(folder),
        "data": {"folder": str(store / "data" / "d1")},
        "seed_checkpoint": str(store / "runs" / "seed-123456789abc" / "checkpoint" / "step-0"),
    }
    record = {
        "name": name,
        "status": status,
        "started": started,
        "wall_s": 7.5,
        "argv": [
            "/t/bin/python",
            "-m",
            "torch.distributed.run",
            f"--log-dir={folder / 'logs'}",
            "-m",
            "converge_harness.rank",
            str(folder / "job.json"),
        ],
        "environment": {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
        "job": job,
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "record.json").write_text(json.dumps(record))


def test_bare_jobs_are_the_harness_jobs_in_other_folders(overhead, tmp_path):
    store, target = tmp_path / "store", tmp_path / "bare"
    leave_run(store, "fsdp2", "control", "2026-01-01T00:00:00")
    leave_run(store, "seed", "seed checkpoint", "2026-01-01T00:00:05")
    seed, control = overhead.bare_jobs(store, target)
    assert (seed.name, control.name, control.harness_wall_s) == ("seed", "fsdp2", 7.5)
    folder = target / "fsdp2-123456789abc"
    assert control.argv[3:] == (
        f"--log-dir={folder / 'logs'}",
        "-m",
        "converge_harness.rank",
        str(folder / "job.json"),
    )
    assert control.environment["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    job = json.loads((folder / "job.json").read_text())
    assert job["run_folder"] == str(folder)
    assert job["seed_checkpoint"].startswith(str(target / "seed-"))
    assert job["data"]["folder"] == str(store / "data" / "d1")


def test_a_script_takes_the_place_of_our_rank(overhead, tmp_path):
    leave_run(tmp_path / "store", "fsdp2", "control", "2026-01-01T00:00:00")
    (job,) = overhead.bare_jobs(tmp_path / "store", tmp_path / "bare", Path("bare.py"))
    assert job.argv[:3] == ("/t/bin/python", "-m", "torch.distributed.run")
    assert job.argv[4] == "bare.py"
    assert len(job.argv) == 6


def test_runs_that_crashed_are_no_measure(overhead, tmp_path):
    leave_run(tmp_path / "store", "fsdp2", "control", "2026-01-01T00:00:00", status="crashed")
    with pytest.raises(SystemExit, match="fsdp2: did not finish"):
        overhead.bare_jobs(tmp_path / "store", tmp_path / "bare")


@pytest.mark.parametrize(
    ("harness", "expected"), [((10.2, 10.0, 9.9), "met"), ((11.0, 10.4, 9.0), "MISSED")]
)
def test_a_row_judges_the_median_of_paired_ratios(overhead, harness, expected):
    row = str(overhead.Row("job", harness, (10.0, 10.0, 10.0), goal=1.03))
    assert row.endswith(f"at most 1.03: {expected}")
    assert f"{min(harness) / 10:.3f} to {max(harness) / 10:.3f}" in row
