"""Real torchrun jobs of torchtitan 0.3 that faults break: what the trainer makes of each.

A pass takes about 10 seconds on two idle cores.
"""

import json

import pytest
import titan_0_3_jobs as jobs

jobs.require_titan_0_3()
pytestmark = pytest.mark.slow

STEPS = 4
EVERY = {"steps": STEPS, "checkpoint_every": 2, "sample_steps": []}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("titan-0-3"))


def steps(lines):
    return {line["step"]: line for line in lines if line["kind"] == "step"}


def loaded(lines):
    return [line["step"] for line in lines if line["kind"] == "loaded"]


def struck(runs, name):
    files = sorted((runs.folder / name / "faults").iterdir())
    return [json.loads(path.read_text()) for path in files]


def test_a_script_of_faults_strikes_once_each_and_replays_are_bit_identical(runs):
    script = [
        {"kind": "disk_full", "step": 2, "rank": 1},
        {"kind": "kill", "step": 3, "rank": 1},
    ]
    done = runs.torchrun("script", max_restarts=2, faults=script, **EVERY)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "No space left on device" in done.stderr
    passes = runs.passes("script")
    assert [loaded(lines) for lines in passes] == [[0], [0], [2]]
    assert [list(steps(lines)) for lines in passes] == [[1, 2], [1, 2], [3, 4]]
    assert [(fault["kind"], fault["pass"], fault["torn"]) for fault in struck(runs, "script")] == [
        ("disk_full", 1, True),
        ("kill", 2, False),
    ]
    first, again = steps(passes[0]), steps(passes[1])
    for signal in ("loss_recomputed", "grad_norm_recomputed", "batch_digest", "lr", "tokens"):
        assert [first[step][signal] for step in (1, 2)] == [again[step][signal] for step in (1, 2)]


def test_a_truncated_shard_is_found_when_it_is_loaded(runs):
    script = [{"kind": "ckpt_torn", "step": 2, "rank": 1, "torn": "truncated"}]
    done = runs.torchrun("truncated", max_restarts=1, faults=script, **EVERY)
    assert done.returncode == 1
    first, second = runs.passes("truncated")
    assert list(steps(first)) == [1, 2]
    assert (loaded(second), steps(second)) == ([], {})  # torchtitan takes it for whole, and dies
    (runs.folder / "truncated" / "checkpoint" / "step-2").rename(runs.folder / "aside")
    done = runs.torchrun("truncated", faults=script, **EVERY)
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(steps(runs.passes("truncated")[2])) == [1, 2, 3, 4]


def test_nan_in_the_first_stage_of_a_pipeline_stops_the_run_in_its_first_step(runs):
    pipeline = {"dp_shard": 1, "pp": 2, "pipeline_schedule": "1F1B"}
    script = [{"kind": "nan_batch", "step": 1, "rank": 0}]
    done = runs.torchrun("nan", max_restarts=1, faults=script, **pipeline, **EVERY)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Loss is not finite" in done.stderr
    first, second = runs.passes("nan")
    assert [line["loss_recomputed"] for line in steps(first).values()] == ["nan"]
    assert list(steps(second)) == [1, 2, 3, 4]
    assert all(isinstance(line["loss"], float) for line in steps(second).values())
