"""Starts of a program without the probe: read by the curve of each, and judged as one run."""

import json
import shutil
from dataclasses import replace

import pytest
from reader_files import file

from converge_harness.judge import calibrate, judge
from converge_harness.model import Judgement, Outcome, RankError, RunStatus
from converge_harness.readers import read_run, read_spec

ONE = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"), 1)
SEGMENTS = [
    {"until": until, "parallelism": {**ONE, "dp_replicate": ranks}, "local_batch_size": 2}
    for until, ranks in ((4, 2), (8, 1))
]
LOSSES = {step: 4.0 / (1 + step) for step in range(1, 9)}


def csv(steps, losses=LOSSES):
    rows = (f"{step},{losses[step]!r}\n" for step in steps)
    return "step,loss\n" + "".join(rows)


def run_folder(folder, *curves, segments=SEGMENTS, saved=(4, 8), repeat=None, **changes):
    """A folder as the launcher leaves it: ``curves`` is the text of each start's, None: none."""
    job = {
        "schema": 1,
        "name": "resized" if segments else "ddp2",
        "role": "test",
        "identity": "abc" if segments else "def",
        "dialect": "command",
        "run_folder": str(folder),
        "seed": 1,
        "steps": 8,
        "parallelism": {**ONE, "dp_replicate": 2},
        "techniques": [],
        "pipeline_schedule": None,
        "cp_rotation": None,
        "train_config": {
            "path": "x.toml",
            "module": None,
            "config": None,
            "model": {},
            "settings": {"training": {"steps": 8}},
        },
        "overrides": {},
        "data": None,
        "sample_steps": [],
        "inject": None,
        "without_fixes": [],
        "repeat": repeat,
        "segments": segments,
        "command": {
            "argv": ["train.py", "{stop_at}"],
            "launcher": "torchrun",
            "probed": False,
            "curves": f"{folder}/output/start-01/loss.csv" if segments else f"{folder}/loss.csv",
            "columns": {},
            "environment": {},
            "folder": "/lab",
            "checkpoints": {"name": "{step}.pt", "last_file": None},
        },
    }
    file(folder, "job.json", json.dumps(job))
    if not segments:
        file(folder, "loss.csv", curves[0])
        return folder
    for number, curve in enumerate(curves, start=1):
        start = {
            "schema": 1,
            "segment": number - 1,
            "ranks": 3 - number,
            "curve": f"output/start-{number:02d}/loss.csv",
            "at": 1000.0 * number,
            "returncode": 0,
            **changes,
        }
        file(folder, f"passes/{number:03d}/start.json", json.dumps(start))
        step = saved[number - 1]
        if step is not None:
            manifest = f"passes/{number:03d}/state/saved-step-{step:08d}.json"
            file(folder, manifest, '{"schema": 1, "files": {".": 1}}')
        if curve is not None:
            file(folder, start["curve"], curve)
    return folder


FIRST, SECOND = csv(range(1, 5)), csv(range(5, 9))


def verdict(tmp_path, *curves, **changes):
    """Of a run with these curves, against an uninterrupted control and its rerun."""
    folder = run_folder(tmp_path / "resized", *curves, **changes)
    control = read_run(run_folder(tmp_path / "ddp2", csv(LOSSES), segments=[]))
    again = read_run(run_folder(tmp_path / "rerun", csv(LOSSES), segments=[], repeat="rerun"))
    learnt = calibrate(control, [again])
    found = judge(read_run(folder), control, learnt, spec=read_spec(folder)).verdict
    return found, {check.name: check for check in found.checks}


def test_the_starts_of_a_program_are_its_passes(tmp_path):
    run = read_run(run_folder(tmp_path / "a", FIRST, SECOND))
    assert list(run.signals["loss"]) == list(LOSSES.values())
    assert run.complete
    first, second = run.passes
    assert [each.loaded_step for each in run.passes] == [0, 4]
    assert (first.whole, second.segment, second.world_size, second.ended) == ((4,), 1, 1, True)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert list(read_run(tmp_path / "b").steps) == list(LOSSES)


def test_a_right_one_passes_and_says_what_only_the_probe_shows(tmp_path):
    found, checks = verdict(tmp_path, FIRST, SECOND)
    assert found.judgement is Judgement.PASS, found.cause
    assert checks["passes-continuous"].detail == "2 passes, 1 from a checkpoint of the run"
    assert checks["segments-as-scheduled"].outcome is Outcome.PASS
    for name in ("state-restored", "data-resumed"):
        assert checks[name].outcome is Outcome.SKIPPED
        assert checks[name].detail.endswith(": the probe does (docs/probe.md)")


@pytest.mark.parametrize(
    ("second", "saved", "cause"),
    [
        (csv(LOSSES), (4, 8), "pass 2 starts from the initial weights although step 4 was saved"),
        (csv(range(3, 9)), (4, 8), "pass 2 starts from step 2 although step 4 was saved"),
        (SECOND, (3, 8), "pass 2 starts from step 4, of which no checkpoint is whole"),
        (SECOND, (None, 8), "pass 2 starts from step 4, of which no checkpoint is whole"),
    ],
    ids=["starts over", "older", "other checkpoint", "no checkpoint"],
)
def test_a_start_from_elsewhere_fails_by_its_cause(tmp_path, second, saved, cause):
    found, _ = verdict(tmp_path, FIRST, second, saved=saved)
    assert found.judgement is Judgement.FAIL
    assert found.cause.startswith("state is lost at the resume: ")
    assert cause in found.cause


def test_a_curve_that_is_off_after_the_resume_fails_there(tmp_path):
    off = {step: loss * (1.01 if step > 4 else 1) for step, loss in LOSSES.items()}
    found, _ = verdict(tmp_path, FIRST, csv(range(5, 9), off))
    assert (found.judgement, found.onset_step) == (Judgement.FAIL, 5)
    assert "step 5 is part of pass 2, which loads step 4 (2 ranks -> one rank)" in found.cause


LACKS = "left 7 of 8 steps: no curve of its starts has a row of step"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (FIRST, csv(range(6, 9)), f"{LACKS} 5"),
        (csv(range(1, 4)), SECOND, f"{LACKS} 4"),
        (FIRST, csv([5, 7, 8]), f"{LACKS} 6"),
        (FIRST, csv(range(5, 8)), f"{LACKS} 8"),
        (FIRST, None, "start-02/loss.csv: does not exist"),
        (FIRST, "nonsense", "start-02/loss.csv: "),
        (FIRST, "step,loss\n", "start-02/loss.csv: "),
    ],
    ids=["after the seam", "before it", "inside", "last", "no curve", "no table", "no row"],
)
def test_a_row_that_is_missing_is_invalid(tmp_path, first, second, words):
    found, _ = verdict(tmp_path, first, second)
    assert found.judgement is Judgement.INVALID
    assert words in found.cause


@pytest.mark.parametrize("curve", [None, csv([5, 6])])
def test_a_start_that_died_has_the_steps_of_its_curve(tmp_path, curve):
    folder = run_folder(tmp_path, FIRST, curve, returncode=None)
    run = read_run(folder)
    assert not run.complete
    assert [each.loaded_step for each in run.passes] == [0, None if curve is None else 4]
    assert run.steps.size == (4 if curve is None else 6)


def crashed(folder):
    """The evidence of a run that broke down in its second start."""
    error = RankError(0, "segment 2 (steps 5 to 8): ValueError: boom")
    return replace(read_run(folder), status=RunStatus.CRASHED, error=error)


@pytest.mark.parametrize(
    ("second", "steps"),
    [
        ("step,loss\n", 4),
        ("", 4),
        ("step,loss\n5,0.66", 4),
        ("step,loss\n5,0.6666666666666666\n6", 5),
        ("nonsense\n", 4),
    ],
    ids=["header alone", "empty", "half a value", "half a row", "no table"],
)
def test_what_a_start_that_died_has_written_is_read_and_no_more(tmp_path, second, steps):
    """Half of a value is another value, and the starts before keep their evidence."""
    folder = run_folder(tmp_path / "resized", FIRST, second, returncode=None)
    well = tmp_path / "resized/passes/001/start.json"
    well.write_text(json.dumps({**json.loads(well.read_text()), "returncode": 0}))
    test = crashed(folder)
    assert test.steps.tolist() == list(LOSSES)[:steps]
    problems = [each for each in test.problems if "because it cannot be read" in each]
    assert [each.startswith("pass 2: its curve counts as one without") for each in problems] == (
        [True] if second == "nonsense\n" else []
    )
    control = read_run(run_folder(tmp_path / "ddp2", csv(LOSSES), segments=[]))
    again = read_run(run_folder(tmp_path / "rerun", csv(LOSSES), segments=[], repeat="rerun"))
    found = judge(test, control, calibrate(control, [again]), spec=read_spec(folder)).verdict
    assert found.judgement is Judgement.ERROR, found.cause
    assert steps > 4 or "crashed at the resume after step 4" in found.cause


def test_of_a_run_that_crashed_in_one_piece_half_a_row_does_not_count(tmp_path):
    half = csv(range(1, 5)) + "5,0.66"
    assert list(read_run(run_folder(tmp_path / "ended", half, segments=[])).steps) == [*range(1, 6)]
    folder = run_folder(tmp_path / "crashed", half, segments=[])
    record = {"schema": 1, "name": "ddp2", "identity": "def", "folder": "x", "wall_s": 1.0}
    file(
        folder,
        "record.json",
        json.dumps({**record, "status": "crashed", "argv": [], "error": None}),
    )
    assert list(read_run(folder).steps) == [*range(1, 5)]
    file(folder, "loss.csv", "step,loss\n1,0.6")
    assert "loss.csv: has no row of values" in read_run(folder).problems[0]


def test_a_row_that_a_logger_writes_twice_is_no_replay(tmp_path):
    found, _ = verdict(tmp_path / "alike", FIRST, csv([5, 5, 6, 7, 8]))
    assert found.judgement is Judgement.PASS, found.cause
    found, _ = verdict(tmp_path / "otherwise", FIRST, "step,loss\n5,0.7\n" + csv(range(5, 9))[10:])
    assert found.judgement is Judgement.INVALID
    assert "step 5 twice in pass 2: loss 0.7, then 0.66" in found.cause


@pytest.mark.parametrize(("second", "judgement"), [((5, 6, 7, 8), "PASS"), ((5, 7, 8), "INVALID")])
def test_means_since_the_last_row_are_losses_where_every_step_has_a_row(
    tmp_path, second, judgement
):
    """As ``trainer_state.json`` has them."""
    folder = run_folder(tmp_path / "resized", FIRST, SECOND)
    for number, steps in enumerate(((1, 2, 3, 4), second), start=1):
        path = folder / f"passes/{number:03d}/start.json"
        curve = f"output/start-{number:02d}/trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "curve": curve}))
        rows = [{"step": step, "loss": LOSSES[step]} for step in steps]
        file(folder, curve, json.dumps({"log_history": rows}))
    control = read_run(run_folder(tmp_path / "ddp2", csv(LOSSES), segments=[]))
    again = read_run(run_folder(tmp_path / "rerun", csv(LOSSES), segments=[], repeat="rerun"))
    learnt = calibrate(control, [again])
    found = judge(read_run(folder), control, learnt, spec=read_spec(folder)).verdict
    assert found.judgement == judgement, found.cause
    assert found.judgement is Judgement.PASS or "means over several steps" in found.cause


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": "two"}, "ranks is 'two', which is not a count"),
        ({"at": None}, "lacks at"),
        ({"schema": 9}, "by a newer converge"),
        ({"curve": "../other/loss.csv"}, "is outside of the run folder"),
        ({"segment": 0}, "pass 2 should be of segment 2"),
        ({"ranks": 2}, "ran on 2 ranks"),
        ({"returncode": 1}, "ended early, after step 8"),
    ],
)
def test_a_start_that_is_not_what_it_should_be_is_invalid(tmp_path, changes, words):
    found, _ = verdict(tmp_path, FIRST, SECOND, **changes)
    assert found.judgement is Judgement.INVALID
    assert words in found.cause
