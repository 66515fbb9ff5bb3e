"""Real torchrun jobs of torchtitan 0.2 in several passes: what a resume restores."""

from pathlib import Path

import numpy as np
import pytest
import titan_0_2_jobs as jobs
from run_folders import largest_difference, tensor_differences

jobs.require_titan_0_2()
pytestmark = pytest.mark.slow

BUGS = Path(__file__).with_name("injected_bugs.py")
STEPS = 5
FIXED = {"training.global_batch_size": 8}


def segment(until, local_batch_size, schedule=None, **degrees):
    return {
        "until": until,
        "parallelism": {**jobs.DEGREES, **degrees},
        "local_batch_size": local_batch_size,
        "pipeline_schedule": schedule,
    }


SEGMENTS = [segment(2, 2), segment(4, 4, tp=2, dp_shard=1), segment(STEPS, 4, "1F1B", pp=2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("titan-0-2"))


@pytest.fixture(scope="module")
def control(runs):
    steps, _ = runs.run("control", steps=STEPS, overrides=FIXED)
    return steps


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def test_an_elastic_run_is_an_uninterrupted_one(runs, control):
    changes = {"steps": STEPS, "segments": SEGMENTS, "overrides": FIXED, "sample_steps": [0]}
    for index in range(len(SEGMENTS)):
        done = runs.torchrun("elastic", segment=index, **changes)
        assert done.returncode == 0, done.stderr[-4000:]
    passes = runs.passes("elastic")
    steps = [line for lines in passes for line in of_kind(lines, "step")]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [of_kind(lines, "header")[0]["segment"] for lines in passes] == [0, 1, 2]
    assert [of_kind(lines, "loaded")[0]["step"] for lines in passes] == [0, 2, 4]
    assert [of_kind(lines, "end")[0]["steps"] for lines in passes] == [2, 4, STEPS]
    assert [line["batch_digest"] for line in steps] == [line["batch_digest"] for line in control]
    assert [line["lr"] for line in steps] == [line["lr"] for line in control]
    assert largest_difference(control, steps, "loss") < 1e-6
    for number, step in ((1, 2), (2, 4)):
        saved = runs.state("elastic", number, "saved", step)
        loaded = runs.state("elastic", number + 1, "loaded", step)
        assert max(tensor_differences(saved, loaded, "parameters").values()) < 1e-12
        apart = np.linalg.norm(loaded["state_sketch"] - saved["state_sketch"], axis=2)
        assert np.max(apart / saved["state_norm"]) < 1e-12
        assert set(saved["state_steps"]) == set(loaded["state_steps"]) == {step}
        for name in ("trainer_step", "lr", "samples_consumed", "schedule_steps"):
            assert saved[name] == loaded[name]
        # A real bug of torchtitan: each rank counts its own tokens, all restore the first's.
        ranks_before, ranks_after = ((2, 1), (1, 2))[number - 1]
        assert saved["tokens_seen"] * ranks_after == loaded["tokens_seen"] * ranks_before


def test_a_killed_run_starts_again_from_the_seed_while_no_checkpoint_is_whole(runs, control):
    """torchtitan 0.2.2 would train on from random weights."""
    changes = {
        "steps": STEPS,
        "checkpoint_every": 4,
        "overrides": FIXED,
        "inject": f"{BUGS}:killed_in_the_first_pass",
    }
    assert runs.torchrun("killed", **changes).returncode != 0
    (runs.folder / "killed" / "checkpoint" / "step-4").mkdir(parents=True)  # without metadata
    again = runs.torchrun("killed", **changes)
    assert again.returncode == 0, again.stderr[-4000:]
    first, second = runs.passes("killed")
    assert [line["step"] for line in of_kind(first, "step")] == [1, 2, 3]
    assert of_kind(second, "loaded")[0]["step"] == 0
    losses = [line["loss"] for line in of_kind(second, "step")]
    assert losses == [line["loss"] for line in control]
    assert (runs.folder / "killed" / "checkpoint" / "step-4" / ".metadata").is_file()
