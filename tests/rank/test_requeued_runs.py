"""Real torchrun jobs that lose their node and are started again by the same command.

Whichever dialect this Python has. A life takes about 4 seconds on two idle cores.
"""

import importlib.metadata
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import titan_0_2_jobs
import titan_0_3_jobs

try:
    VERSION = importlib.metadata.version("torchtitan")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs torchtitan", allow_module_level=True)
jobs = titan_0_3_jobs if VERSION.startswith("0.3.") else titan_0_2_jobs
pytestmark = pytest.mark.slow

LOST = f"{Path(__file__).with_name('injected_bugs.py')}:node_lost"
STEPS = 6
JOB = {"steps": STEPS, "overrides": {"training.global_batch_size": 8}, "sample_steps": [0, 1, 6]}
EVERY = {**JOB, "checkpoint_every": 2}
COMPARED = ("loss_recomputed", "grad_norm_recomputed", "batch_digest", "lr", "tokens")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return jobs.Runs(tmp_path_factory.mktemp("requeued"))


def life(runs, name, job, lost=None):
    """One life of a job: until its node is lost, or to the end."""
    if lost:
        (runs.folder / name).mkdir(exist_ok=True)
        (runs.folder / name / "node_lost.json").write_text(json.dumps(lost))
    done = runs.torchrun(name, inject=LOST, **job)
    assert (done.returncode != 0) is bool(lost), done.stderr[-4000:]
    return done


def steps(lines):
    return {line["step"]: line for line in lines if line["kind"] == "step"}


def told(by_step):
    return {step: [line[signal] for signal in COMPARED] for step, line in by_step.items()}


def loaded(lines):
    return [line["step"] for line in lines if line["kind"] == "loaded"]


def test_a_requeued_run_goes_on_from_its_checkpoint_as_if_nothing_had_happened(runs):
    """Moved weights (an A/A repeat) are moved once, not again at the resume."""
    repeat = {"repeat": "ulp", "repeat_seed": 3}
    control, _ = runs.run("control", **JOB, **repeat)
    life(runs, "resumed", {**EVERY, **repeat}, lost={"step": 6})
    life(runs, "resumed", {**EVERY, **repeat})
    first, second = map(steps, runs.passes("resumed"))
    assert (list(first), list(second)) == ([1, 2, 3, 4, 5], [5, 6])
    assert [loaded(lines) for lines in runs.passes("resumed")] == [[0], [4]]
    assert told(first | second) == told({line["step"]: line for line in control})
    assert told(second)[5] == told(first)[5]
    saved, again = runs.state("resumed", 1, "saved", 4), runs.state("resumed", 2, "loaded", 4)
    assert {name: array.tobytes() for name, array in saved.items()} == {
        name: array.tobytes() for name, array in again.items()
    }


def test_a_pass_starts_from_the_newest_complete_checkpoint(runs):
    """The first dies while it saves, before any is whole; the second's newest is cut short."""
    job = {**EVERY, "seed_checkpoint": None}
    life(runs, "torn", job, lost={"step": 2, "saving": True})
    life(runs, "torn", job, lost={"step": 5})
    run = runs.folder / "torn"
    shard = next((run / "checkpoint" / "step-4").glob("__1_*"))
    os.truncate(shard, shard.stat().st_size // 2)
    life(runs, "torn", job)
    passes = runs.passes("torn")
    assert [loaded(lines) for lines in passes] == [[0], [0], [2]]
    assert [list(steps(lines)) for lines in passes] == [[1, 2], [1, 2, 3, 4], [3, 4, 5, 6]]
    first, second, third = (told(steps(lines)) for lines in passes)
    assert first == {step: second[step] for step in (1, 2)}
    assert {step: third[step] for step in (3, 4)} == {step: second[step] for step in (3, 4)}
    assert sorted(path.name for path in (run / "torn").iterdir()) == ["step-2", "step-4"]
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2", "step-4"]


def test_a_run_without_checkpoints_starts_over_and_only_its_last_start_is_evidence(runs):
    control, _ = runs.run("plain control", **JOB)
    life(runs, "over", JOB, lost={"step": 4})
    assert (runs.folder / "over" / "tensors" / "step-00000001.npz").exists()
    life(runs, "over", {**JOB, "sample_steps": [6]})
    folder = runs.folder / "over"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert told(steps(lines)) == told({line["step"]: line for line in control})
    assert [path.name for path in (folder / "tensors").iterdir()] == ["step-00000006.npz"]
    assert not (folder / "metrics.jsonl.part").exists()


@pytest.mark.parametrize("job", [{**EVERY, "checkpoint_every": 1}, JOB], ids=["passes", "over"])
def test_ranks_that_live_on_unseen_stop_and_harm_nothing(runs, job):
    """The second life goes on, or over, while ranks of the first still wait in step 5."""
    name = "unseen in passes" if "checkpoint_every" in job else "unseen"
    folder = runs.folder / name
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(life, runs, name, job, lost={"step": 5, "unseen": True})
        deadline = time.monotonic() + 120
        while not (folder / "waits").exists():
            assert time.monotonic() < deadline
            assert not first.done(), first.result()
            time.sleep(0.05)
        life(runs, name, job)
        left = {path: path.read_bytes() for path in folder.glob("checkpoint/*/*")}
        (folder / "seen").touch()
        assert "SupersededError" in first.result().stderr
    assert left == {path: path.read_bytes() for path in folder.glob("checkpoint/*/*")}
    whole = folder / ("passes/002" if "checkpoint_every" in job else "") / "metrics.jsonl"
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert lines[-1] == {"kind": "end", "steps": STEPS}
    assert list(steps(lines)) == ([5, 6] if left else [1, 2, 3, 4, 5, 6])


def test_a_seed_checkpoint_is_made_again_over_half_of_one(runs):
    folder = runs.folder / "seed again" / "checkpoint" / "step-0"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"half")
    single = {"dp_shard": 1}
    done = runs.torchrun("seed again", role="seed checkpoint", seed_checkpoint=None, **single)
    assert done.returncode == 0, done.stderr[-4000:]
    whole = Path(runs.seed_checkpoint)
    sizes = [(each / "__0_0.distcp").stat().st_size for each in (folder, whole)]
    assert sizes[0] == sizes[1]
    assert (folder / ".metadata").is_file()
