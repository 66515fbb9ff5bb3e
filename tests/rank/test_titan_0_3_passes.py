"""Real torchrun jobs of torchtitan 0.3 in several passes: what a resume restores, and what not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import titan_0_3_jobs as jobs
from run_folders import largest_difference, tensor_differences

jobs.require_titan_0_3()
pytestmark = pytest.mark.slow

BUGS = Path(__file__).with_name("injected_bugs.py")
STEPS = 6
FIXED = {"training.global_batch_size": 8}


def segment(until, *, local_batch_size=4, schedule=None, **degrees):
    return {
        "until": until,
        "parallelism": {**jobs.DEGREES, **degrees},
        "local_batch_size": local_batch_size,
        "pipeline_schedule": schedule,
    }


SEGMENTS = [
    segment(2),
    segment(4, dp_shard=1, local_batch_size=2),
    segment(STEPS, pp=2, schedule="1F1B"),
]
ELASTIC = {"steps": STEPS, "segments": SEGMENTS, "overrides": FIXED, "sample_steps": [0, 2, 4]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("titan-0-3"))


@pytest.fixture(scope="module")
def control(runs):
    steps, _ = runs.run("control", steps=STEPS, overrides=FIXED)
    return steps


@pytest.fixture(scope="module")
def elastic(runs):
    """The lines of the three passes of an elastic run."""
    for index in range(len(SEGMENTS)):
        done = runs.torchrun("elastic", segment=index, **ELASTIC)
        assert done.returncode == 0, done.stderr[-4000:]
        if index == 0:  # others resume from here too
            shutil.copytree(runs.folder / "elastic", runs.folder / "first segment")
    return runs.passes("elastic")


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def curve(passes):
    return [line for lines in passes for line in of_kind(lines, "step")]


def state_differences(saved, loaded):
    """Largest relative differences of parameters and of the optimizer's states."""
    assert saved["names"].tolist() == loaded["names"].tolist()
    assert (
        saved["state_names"].tolist() == loaded["state_names"].tolist() == ["exp_avg", "exp_avg_sq"]
    )
    parameters = max(tensor_differences(saved, loaded, "parameters").values())
    apart = np.linalg.norm(loaded["state_sketch"] - saved["state_sketch"], axis=2)
    return parameters, np.max(apart / saved["state_norm"])


def test_the_passes_of_an_elastic_run_make_the_curve_of_an_uninterrupted_one(control, elastic):
    steps = curve(elastic)
    assert [line["step"] for line in steps] == [line["step"] for line in control]
    assert [line["batch_digest"] for line in steps] == [line["batch_digest"] for line in control]
    assert [line["lr"] for line in steps] == [line["lr"] for line in control]
    assert largest_difference(control, steps, "loss") < 1e-6
    assert largest_difference(control, steps, "loss_recomputed") < 1e-6
    assert largest_difference(control, steps, "grad_norm_recomputed") < 1e-5


def test_each_pass_says_what_it_is_and_where_it_started(runs, elastic):
    headers = [of_kind(lines, "header")[0] for lines in elastic]
    assert [(h["pass"], h["segment"], h["world_size"]) for h in headers] == [
        (1, 0, 2),
        (2, 1, 1),
        (3, 2, 4),
    ]
    loads = [of_kind(lines, "loaded")[0] for lines in elastic]
    assert [line["step"] for line in loads] == [0, 2, 4]
    assert [of_kind(lines, "end")[0]["steps"] for lines in elastic] == [2, 4, STEPS]
    times = [line["at"] for lines in elastic for line in lines if "at" in line]
    assert len(times) == STEPS + 3
    assert times == sorted(times)
    folder = runs.folder / "elastic"
    written = sorted(str(p.relative_to(folder / "passes")) for p in folder.glob("passes/*/*/*.npz"))
    assert written == [
        "001/state/saved-step-00000002.npz",
        "001/tensors/step-00000000.npz",
        "001/tensors/step-00000002.npz",
        "002/state/loaded-step-00000002.npz",
        "002/state/saved-step-00000004.npz",
        "002/tensors/step-00000004.npz",
        "003/state/loaded-step-00000004.npz",
    ]
    degrees = [
        json.loads((folder / "passes" / f"00{number}" / "in_force.json").read_text())["degrees"]
        for number in (1, 2, 3)
    ]
    assert degrees == [part["parallelism"] for part in SEGMENTS]
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["step-2", "step-4"]
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(("number", "step"), [(1, 2), (2, 4)])
def test_what_is_loaded_is_what_was_saved_on_other_degrees(runs, elastic, number, step):
    assert len(elastic) == 3
    saved = runs.state("elastic", number, "saved", step)
    loaded = runs.state("elastic", number + 1, "loaded", step)
    assert max(state_differences(saved, loaded)) < 1e-12
    assert set(saved["state_steps"]) == set(loaded["state_steps"]) == {step}
    for name in ("trainer_step", "lr", "samples_consumed", "schedule_steps"):
        assert saved[name] == loaded[name]
    assert saved["trainer_step"] == step
    assert saved["samples_consumed"] == 8 * step


def test_the_trainers_count_of_tokens_is_wrong_on_another_data_parallel_degree(runs, elastic):
    """A real bug of torchtitan: each rank counts its own tokens, and all restore the first's."""
    assert len(elastic) == 3
    for number, step, factor in ((1, 2, 1 / 2), (2, 4, 2)):
        saved = runs.state("elastic", number, "saved", step)
        loaded = runs.state("elastic", number + 1, "loaded", step)
        assert loaded["tokens_seen"] == factor * saved["tokens_seen"]


def test_a_resume_that_drops_the_optimizers_state_is_seen(runs, control, elastic):
    assert len(elastic) == 3
    shutil.copytree(runs.folder / "first segment", runs.folder / "dropped")
    forgetful = {
        **ELASTIC,
        "overrides": {**FIXED, "checkpoint.exclude_from_loading": ["optimizer"]},
    }
    done = runs.torchrun("dropped", segment=1, **forgetful)
    assert done.returncode == 0, done.stderr[-4000:]
    saved = runs.state("dropped", 1, "saved", 2)
    loaded = runs.state("dropped", 2, "loaded", 2)
    assert saved["state_names"].tolist() == ["exp_avg", "exp_avg_sq"]
    assert loaded["state_names"].tolist() == []
    assert np.isnan(loaded["state_steps"]).all()
    assert loaded["lr"] != saved["lr"]
    assert saved["parameters_sketch"] == pytest.approx(loaded["parameters_sketch"], rel=1e-12)
    steps = curve(runs.passes("dropped"))
    assert largest_difference(control[:3], steps[:3], "loss") < 1e-6  # the load was no loss
    assert largest_difference(control[3:4], steps[3:4], "loss") > 1e-5


def test_a_killed_run_goes_on_from_its_newest_checkpoint(runs, control):
    fault = {
        "steps": STEPS,
        "checkpoint_every": 2,
        "overrides": FIXED,
        "inject": f"{BUGS}:killed_in_the_first_pass",
    }
    killed = runs.torchrun("killed", **fault)
    assert killed.returncode != 0
    again = runs.torchrun("killed", **fault)
    assert again.returncode == 0, again.stderr[-4000:]
    first, second = runs.passes("killed")
    assert [line["step"] for line in of_kind(first, "step")] == [1, 2, 3]
    assert not of_kind(first, "end")
    assert [line["step"] for line in of_kind(second, "step")] == [3, 4, 5, 6]
    (header,) = of_kind(second, "header")
    assert (header["pass"], header["segment"]) == (2, None)
    assert of_kind(second, "loaded")[0]["step"] == 2
    assert of_kind(second, "end")[0]["steps"] == STEPS
    steps = [*of_kind(first, "step")[:2], *of_kind(second, "step")]
    assert [line["loss"] for line in steps] == [line["loss"] for line in control]  # same degrees
    saved, loaded = runs.state("killed", 1, "saved", 2), runs.state("killed", 2, "loaded", 2)
    assert saved.keys() == loaded.keys()
    for name, array in saved.items():
        assert np.array_equal(array, loaded[name])
    assert {path.name for path in (runs.folder / "killed" / "checkpoint").iterdir()} == {
        "step-2",
        "step-4",
    }
