"""Starts of a program without the probe that converge killed: read, and judged as one run."""

import json

import pytest
from reader_files import file
from test_reading_starts import LOSSES, ONE, csv, run_folder

from converge_harness.judge import calibrate, judge
from converge_harness.model import Judgement, Outcome
from converge_harness.readers import read_run, read_spec, steps_so_far

FAULT = {"kind": "kill", "step": 5, "rank": 1, "node": 0, "torn": "death"}
RECOVERY = {
    "faults": [FAULT],
    "checkpoint_every": 2,
    "restarts": "harness",
    "max_restarts": 3,
    "within_s": 60.0,
    "nodes": [1, 1],
}
STRUCK = {
    "schema": 1,
    "index": 0,
    "kind": "kill",
    "step": 5,
    "at": 1500.0,
    "pass": 1,
    "torn": False,
    "rank": 1,
    "curve_step": 6,
}
"""Killed at step 6 or after it, so the checkpoint of step 4 is the newest that is surely whole."""
FIRST, SECOND = csv(range(1, 7)), csv(range(5, 9))
AT_STOP = "1 fault; preempt at step 5 struck pass 1 when converge had read step 6 of its curve"


def killed(
    folder,
    *curves,
    struck=STRUCK,
    saved=((2, 4), (6, 8)),
    codes=(1, 0),
    at=2000.0,
    seen=(),
    kind="kill",
):
    """A folder as the launcher leaves it; ``seen``: when each start's first row was seen."""
    run_folder(folder, *curves, saved=(None,) * len(curves))
    job = json.loads((folder / "job.json").read_text())
    faults = [{**FAULT, "kind": kind}]
    recovery = {**RECOVERY, "faults": faults}
    job |= {"segments": [], "recovery": recovery, "checkpoint_every": 2, "faults": faults}
    file(folder, "job.json", json.dumps({**job, "parallelism": {**ONE, "dp_replicate": 2}}))
    for number in range(1, len(curves) + 1):
        path = f"passes/{number:03d}/start.json"
        start = json.loads((folder / path).read_text())
        row = seen[number - 1] if seen else 1000.0 * number if number == 1 else at
        changed = {
            "segment": None,
            "ranks": 2,
            "returncode": codes[number - 1],
            "at": 900.0 * number,
        }
        file(folder, path, json.dumps({**start, **changed, "first_row_at": row}))
        for step in saved[number - 1]:
            manifest = f"passes/{number:03d}/state/saved-step-{step:08d}.json"
            file(folder, manifest, '{"schema": 1, "files": {".": 1}}')
    if struck is not None:
        file(folder, "faults/0.json", json.dumps({**struck, "kind": kind}))
    return folder


def verdict(tmp_path, *curves, **changes):
    """Of a run with these curves, against an uninterrupted control and its rerun."""
    folder = killed(tmp_path / "killed", *curves, at=1510.0, **changes)
    control = read_run(run_folder(tmp_path / "ddp2", csv(LOSSES), segments=[]))
    again = read_run(run_folder(tmp_path / "rerun", csv(LOSSES), segments=[], repeat="rerun"))
    learnt = calibrate(control, [again])
    found = judge(read_run(folder), control, learnt, spec=read_spec(folder)).verdict
    return found, {check.name: check for check in found.checks}


def test_a_right_one_passes_and_says_where_it_was_struck(tmp_path):
    found, checks = verdict(tmp_path, FIRST, SECOND)
    assert found.judgement is Judgement.PASS, found.cause
    assert {name: checks[name].detail for name in ("faults-struck", "recovers-in-time")} == {
        "faults-struck": AT_STOP.replace("preempt", "kill"),
        "recovers-in-time": "kill at step 5: 10.0 s",
    }
    assert checks["passes-continuous"].outcome is Outcome.PASS
    assert checks["replays-agree"].detail == "2 steps replayed, with equal values"
    for name in ("state-restored", "data-resumed"):
        assert checks[name].outcome is Outcome.SKIPPED


@pytest.mark.parametrize("ending", ["7,0.", "7,0.5,", "7", "\n7,0.4", "7,\xe9"[:3]])
def test_half_of_a_last_line_is_no_row(tmp_path, ending):
    folder = killed(tmp_path, FIRST + ending, SECOND)
    assert read_run(folder).passes[0].steps.tolist() == [1, 2, 3, 4, 5, 6]


OFF = {step: loss * (1.01 if step == 5 else 1) for step, loss in LOSSES.items()}
SAVED_NOTHING = ((), (2, 4, 6, 8))


@pytest.mark.parametrize(
    ("second", "changes", "cause"),
    [
        (csv(LOSSES), {}, "pass 2 starts from the initial weights although step 4 was saved"),
        (csv(range(3, 9)), {}, "pass 2 starts from step 2 although step 4 was saved"),
        (csv(range(7, 9)), {}, "pass 2 starts from step 6, of which no checkpoint is whole"),
        (SECOND, {"saved": ((2,), (6, 8))}, "from step 4, of which no checkpoint is whole"),
        (csv(LOSSES), {"saved": SAVED_NOTHING}, "pass 1 has left no checkpoint of step 2"),
        (csv(range(5, 9), OFF), {}, "a replay differs from the first time: loss of step 5 is"),
        (SECOND, {"seen": (1000.0, 1600.0)}, "no recovery in time"),
        (
            None,
            {"codes": (1, 1), "saved": ((2, 4), ())},
            "no recovery in time: no step ended after",
        ),
        ("step,loss\n", {"codes": (1, 1), "saved": ((2, 4), ())}, "no recovery in time: no step"),
    ],
    ids=[
        *("starts over", "older", "newer", "not saved", "never saves", "replay off"),
        *("late", "never again", "no row"),
    ],
)
def test_what_the_curves_show_of_a_mistake_fails_by_its_cause(tmp_path, second, changes, cause):
    found, _ = verdict(tmp_path, FIRST, second, **changes)
    assert found.judgement is Judgement.FAIL, found.cause
    assert cause in found.cause


def fault(**changes):
    return {**STRUCK, **changes}


@pytest.mark.parametrize(
    ("curves", "changes", "words"),
    [
        (
            (csv(LOSSES),),
            {"struck": None, "codes": (0,), "saved": ((2, 4, 6, 8),)},
            (
                "fault 1 (kill at step 5) never struck: the program ended before converge could "
                "interrupt it, so let it write every row of its curve at once (flush=True)"
            ),
        ),
        (
            (csv(LOSSES),),
            {"struck": None, "codes": (0,), "saved": ((2, 4, 6, 8),), "kind": "ckpt_torn"},
            (
                "never struck: converge read the next step too late, so let the program write "
                "every row of its curve at once (flush=True) and train longer; or by then the "
                "checkpoint was not there"
            ),
        ),
        (
            (csv(LOSSES),),
            {"codes": (0,), "saved": ((2, 4, 6, 8),)},
            "kill at step 5 did not end pass 1, which went on to step 8",
        ),
        (
            (csv(LOSSES),),
            {"codes": (0,), "saved": ((2, 4, 6, 8),), "kind": "preempt"},
            "did not end pass 1, which went on to step 8: the steps after SIGTERM took less time",
        ),
        (
            (FIRST, csv([8])),
            {"kind": "preempt", "saved": ((2, 4, 6, 7), (8,)), "codes": (None, 0)},
            "left 7 of 8 steps: no curve of its starts has a row of step 7",
        ),
        (
            (csv(LOSSES), csv([7, 8])),
            {"kind": "hang", "saved": ((2, 4, 6), (8,)), "codes": (None, 0)},
            "hang at step 5 did not hold pass 1, which trained its last step: the others do not",
        ),
        ((FIRST, SECOND), {"struck": None}, "fault 1 (kill at step 5) never struck"),
        ((FIRST, SECOND), {"struck": fault(step=4)}, "was kill at step 4"),
        ((FIRST, SECOND), {"struck": fault(rank=0)}, "struck rank 0, rank 1 is named"),
        ((FIRST, SECOND), {"seen": (1000.0, None)}, "it is not recorded when it ended: kill at"),
        ((FIRST, csv(range(5, 8))), {}, "left 7 of 8 steps: no curve of its starts has a row of"),
        ((csv(range(1, 4)), csv(range(6, 9))), {}, "no curve of its starts has a row of step 4"),
        ((csv(range(1, 5)), SECOND), {}, "pass 1, which kill struck at step 5, left nothing of"),
        ((FIRST, SECOND, csv([7, 8])), {}, "pass 2 died, and not by a fault of the script"),
        (("nonsense\n", SECOND), {}, "start-01/loss.csv: no step among 'nonsense'"),
    ],
    ids=[
        *(
            "never killed",
            "never torn",
            "killed too late",
            "trained to its end",
            "no last row",
            "not held",
        ),
        *("no fault", "other step", "other rank"),
        *("time unknown", "last row lost", "rows lost", "row of the fault lost", "died by itself"),
        "no table",
    ],
)
def test_what_shows_nothing_is_invalid(tmp_path, curves, changes, words):
    if len(curves) == 3:
        changes = {"codes": (1, 1, 0), "saved": ((2, 4), (6,), (8,))}
    found, checks = verdict(tmp_path, *curves, **changes)
    assert found.judgement is Judgement.INVALID, found.cause
    assert any(words in text for text in (found.cause, *(each.detail for each in checks.values())))


def test_a_program_that_stops_when_it_is_asked_to_goes_on_from_there(tmp_path):
    """It trained one step more, saved it, and ended with 0."""
    found, checks = verdict(
        tmp_path,
        *(csv(range(1, 8)), csv([8])),
        kind="preempt",
        saved=((2, 4, 6, 7), (8,)),
        codes=(None, 0),
    )
    assert found.judgement is Judgement.PASS, found.cause
    assert checks["faults-struck"].detail == AT_STOP
    late, checks = verdict(tmp_path / "late", FIRST, SECOND, kind="preempt", codes=(1, 0))
    assert late.judgement is Judgement.PASS, late.cause
    assert checks["faults-struck"].detail.startswith(
        f"{AT_STOP}; pass 1 saved no step after SIGTERM at step 5, or not before it was killed: "
        "training goes on from step 4"
    )


def test_a_rank_that_was_made_to_hang_is_judged_as_one_that_was_killed(tmp_path):
    found, checks = verdict(tmp_path, FIRST, SECOND, kind="hang", codes=(None, 0))
    assert found.judgement is Judgement.PASS, found.cause
    assert checks["recovers-in-time"].detail == "hang at step 5: 10.0 s"
    wrong, _ = verdict(tmp_path / "b", FIRST, csv(LOSSES), kind="hang", codes=(None, 0))
    assert "pass 2 starts from the initial weights although step 4 was saved" in wrong.cause


def test_the_steps_of_a_growing_curve(tmp_path):
    path = tmp_path / "loss.csv"
    grown = []
    for text in (None, "", "step,lo", "step,loss\n", "step,loss\n3", "step,loss\n3,1.5\n4,1."):
        if text is not None:
            path.write_text(text)
        grown.append(steps_so_far(path, {}))
    path.write_text(csv([3, 4, 5]))
    assert [*map(list, grown), list(steps_so_far(path, {}))] == [[], [], [], [], [], [3], [3, 4, 5]]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    assert list(steps_so_far(path, {})) == [7]


@pytest.mark.parametrize("lost", ["", "step,loss\n", csv(range(1, 6))])
def test_rows_that_converge_had_read_and_that_are_gone_show_nothing(tmp_path, lost):
    """A program that never saves and starts over would pass, if its first start did not count."""
    found, checks = verdict(tmp_path, lost, csv(LOSSES), saved=((), (2, 4, 6, 8)))
    assert found.judgement is not Judgement.PASS
    assert checks["replays-agree"].outcome is Outcome.INVALID
    assert "left nothing of step 6" in checks["replays-agree"].detail


def test_older_checkpoints_may_be_deleted_and_the_newest_may_not_be_complete_yet(tmp_path):
    kept_newest, _ = verdict(tmp_path / "a", FIRST, SECOND, saved=((4,), (8,)))
    assert kept_newest.judgement is Judgement.PASS, kept_newest.cause
    not_complete, _ = verdict(tmp_path / "b", FIRST, csv(range(3, 9)), saved=((2,), (8,)))
    assert not_complete.judgement is Judgement.PASS, not_complete.cause
