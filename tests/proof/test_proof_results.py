"""Run folders that the real judge has judged become one result, a page and a picture."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from proof.catalogue import Catalogue, Matrix
from proof.docstrings import Bug
from proof.document import document
from proof.goals import goals
from proof.grading import Effect
from proof.page import page
from proof.parts import LeftOut
from proof.picture import draw
from proof.regimes import Regime
from proof.results import Proof, Result, collect

from converge_harness.judge import calibrate, judge
from converge_harness.model import CauseClass
from converge_harness.readers import read_run
from converge_harness.report import build_view
from converge_harness.report.renderers.json_document import to_json

STEPS = 16
BUG = Bug(
    id="",
    kind="C1",
    summary="Something | goes wrong.",
    reference="torchtitan issue 1",
    technique="FSDP 2",
    first_step=1,
    signature="as it looks",
    causes=(CauseClass.GRADIENT_SCALE,),
)


def loss(step: int, ulps: int = 0) -> float:
    return (8 - 0.2 * step) * (1 + ulps * 2e-7)


def leave(folder: Path, loss=loss, norm=1.0, digest=None, steps=STEPS) -> Path:
    """A run folder as a rank leaves it, without per-tensor evidence."""
    folder.mkdir()
    repeat = "ulp" if folder.name.startswith("repeat") else None
    job = {"schema": 1, "name": folder.name, "identity": folder.name, "repeat": repeat}
    (folder / "job.json").write_text(json.dumps(job))
    header = {"schema": 1, "kind": "header", "identity": folder.name, "world_size": 2}
    lines = [{**header, "steps": STEPS, "versions": {}}]
    for step in range(1, steps + 1):
        seen = (digest or {}).get(step, f"{step:016x}")
        values = {"loss": loss(step), "grad_norm": norm, "lr": 1e-3, "tokens": 2048}
        values |= {"grad_norm_recomputed": norm}
        batch = {"batch_digest": seen, "batch_agrees": True}
        lines.append({"kind": "step", "step": step, **values, **batch})
    lines.append({"kind": "end", "steps": steps})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What converge says about three bugs, a rung each that shows and not, and a correct run."""
    runs = tmp_path_factory.mktemp("runs")
    control = leave(runs / "control")
    repeats = [
        leave(
            runs / f"repeat{n}",
            loss=lambda step, n=n: loss(step, n * (-1) ** step),
            norm=1 + n / 1e7,
        )
        for n in (1, 2, 3, 4)
    ]
    tests = [
        leave(runs / "loud", loss=lambda step: loss(step) * (1.2 if step > 4 else 1)),
        leave(runs / "quiet", norm=2.0),
        leave(runs / "shuffled", digest={2: "f" * 16}),
        leave(runs / "silent"),
        leave(runs / "rung_1e_2", norm=1.01),
        leave(runs / "rung_1e_9", norm=1 + 1e-9),
        leave(runs / "right", loss=lambda step: loss(step, 1)),
        leave(runs / "cut", steps=9),
    ]
    return report_of(control, repeats, tests)


def report_of(control: Path, repeats: list[Path], tests: list[Path]) -> dict:
    """What ``converge run`` writes on these, by its own judge and its own writer."""
    read = {path: read_run(path) for path in (control, *repeats, *tests)}
    calibration = calibrate(read[control], [read[path] for path in repeats])
    judged = [judge(read[path], read[control], calibration) for path in tests]
    verdicts = [each.verdict for each in judged]
    view = build_view(
        title="bugs",
        verdicts=verdicts,
        evidences=read.values(),
        comparisons={each.verdict.name: each.comparison for each in judged},
    )
    written = json.loads(to_json(view))
    for run in (*written["controls"], *written["tests"]):
        run.update(world_size=2, wall_s=10.0)
    (like,) = written["controls"]
    written["repeats"] = [
        {**like, "name": path.name, "source": str(path), "control": "control", "repeat": "ulp"}
        for path in repeats
    ]
    return written


def in_regime(regime: Regime, proof: Proof, held_out: Proof | None = None) -> Result:
    left_out = (LeftOut("compiled", "it runs in eager only"), LeftOut("other", "the same"))
    return Result(regime, proof, held_out, left_out, seconds=90.0)


def fp32(proof: Proof, held_out: Proof | None = None) -> Result:
    return in_regime(Regime.FP32, proof, held_out)


def assert_tables_whole(text: str) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1, table


def proof_of(report, *bugs: Bug, correct=("right",)) -> Proof:
    names = tuple(bug.id for bug in bugs)
    matrices = (Matrix(Path("c1.toml"), False, names), Matrix(Path("correct.toml"), True, correct))
    reports = {"c1": report, "correct": report}
    return collect(Catalogue(matrices, bugs), reports)


LOUD = replace(BUG, id="loud", kind="C4", first_step=5)
QUIET = replace(BUG, id="quiet")
SHUFFLED = replace(BUG, id="shuffled", kind="C6", first_step=2)
SILENT = replace(BUG, id="silent", kind="C7")
RUNGS = [replace(BUG, id=f"rung_1e_{n}", kind="C7", magnitude=10.0**-n) for n in (9, 2)]


@pytest.fixture(scope="module")
def proof(report):
    return proof_of(report, LOUD, QUIET, SHUFFLED, SILENT, *RUNGS)


def test_bugs_are_caught_when_their_evidence_shows(proof):
    found = {each.graded.bug.id: each.graded.answer for each in proof.bugs}
    assert {name: (each.caught, each.first_step) for name, each in found.items()} == {
        "loud": (True, 5),
        "quiet": (True, 1),
        "shuffled": (True, 2),
        "silent": (False, None),
    }
    assert proof.classes == ("C1", "C4", "C6", "C7")


def test_the_same_runs_are_judged_by_the_rules_of_elsewhere(proof):
    flagged = {each.graded.bug.id: set(each.run.flagged_by) for each in proof.bugs}
    assert flagged["silent"] == flagged["shuffled"] == set()
    assert flagged["quiet"] == {"grad norm 1%"}
    assert {"exact equality", "5%, one step excused", "final loss 1%"} <= flagged["loud"]
    scores = {score.name: (score.bugs_caught, score.false_alarms) for score in proof.scores}
    assert scores["converge"] == (3, 0)
    assert scores["exact equality"] == (1, 1)
    assert scores["grad norm 1%"] == (1, 0)


def test_a_ladder_ends_where_it_is_no_longer_caught(proof):
    (ladder,) = proof.ladders
    assert (ladder.name, ladder.limit) == ("rung", 1e-2)
    assert [rung.graded.bug.magnitude for rung in ladder.rungs] == [1e-2, 1e-9]
    assert replace(ladder, rungs=ladder.rungs[::-1]).limit is None


def test_goals_are_met_or_missed(report, proof):
    def met(measured: Proof, *, part: bool = False) -> list[bool]:
        return [goal.met for goal in goals(measured, part=part)]

    answers = {each.graded.bug.id: each.graded.answer for each in proof.bugs}
    scaled = answers["quiet"].cause_class
    assert scaled is CauseClass.GRADIENT_SCALE
    right = replace(QUIET, causes=(scaled,))
    assert met(proof_of(report, right)) == [True] * 5
    assert met(proof_of(report, replace(SILENT, kind="C3")))[0] is False
    assert met(proof_of(report, SILENT))[0] is True
    late = proof_of(report, replace(LOUD, first_step=1), right)
    assert [met(late, part=part)[1] for part in (True, False)] == [False, False]
    in_time = proof_of(report, LOUD, right)
    assert [met(in_time, part=part)[1] for part in (True, False)] == [True, False]
    other = next(cause for cause in CauseClass if cause is not scaled)
    assert met(proof_of(report, replace(right, causes=(other,))))[2:4] == [False, False]
    assert met(proof_of(report, right, correct=("loud",)))[4] is False


def test_what_cannot_be_judged_is_trouble_and_no_catch(report):
    broken = proof_of(report, replace(BUG, id="cut"))
    assert not broken.bugs[0].graded.answer.caught
    assert "cut cannot be judged" in broken.troubles[0]
    assert not proof_of(report, LOUD, QUIET, SHUFFLED, SILENT).troubles


def test_the_document_has_what_issue_and_page_need(proof):
    whole = document([fp32(proof, proof)], part=True, generated="now")
    assert json.loads(json.dumps(whole, allow_nan=False)) == whole
    (written,) = whole["regimes"]
    assert written["regime"] == "fp32"
    (loud,) = [bug for bug in written["bugs"] if bug["id"] == "loud"]
    assert {"id", "class", "caught", "tier", "first_step", "cause", "cause_right"} <= set(loud)
    assert (loud["steps"], loud["rank_seconds"]) == (16, 20.0)
    assert (loud["class"], loud["first_step"], loud["delay"]) == ("C4", 5, 0)
    assert [{"name", "verdict"} - set(each) for each in written["correct"]] == [set()]
    assert {"name", "bugs_caught", "false_alarms"} <= set(written["rules"][0])
    assert (written["totals"]["bugs"], written["totals"]["caught_by_step_2"]) == (4, 2)
    assert written["totals"]["show_by_step_2"] == 3
    assert written["held_out"]["totals"]["caught"] == 3
    assert written["limits"][0]["limit"] == 1e-2
    # Eight tests, a control and four repeats, once each though two matrices share them.
    cost = {"runs": 13, "rank_seconds": 260.0, "of_controls_and_repeats": 100.0, "wall_s": 90.0}
    assert written["cost"] == cost


def test_the_page_begins_with_the_result_and_its_tables_are_whole(proof):
    text = page([fp32(proof, proof)], part=False, generated="now")
    first = text.split("\n\n")[1]
    assert "catches 3 of 4 silent bugs" in first
    assert "no false alarms on 1 correct" in first
    assert "](benchmark.png)" in text
    assert re.search(r"^1\. `silent` \(C7, .*\) not caught \(PASS\)\.", text, re.MULTILINE)
    assert_tables_whole(text)
    row, _held_out = re.findall(r"^\| `loud`: .*\|$", text, re.MULTILINE)
    assert row.endswith("|  | 0.2 | no |")
    (right,) = re.findall(r"^\| `right` .*\|$", text, re.MULTILINE)
    assert right.endswith("| ✓ PASS | 2.75e-7 | 20 |")
    for heading in ("Goals", "By class", "Every bug", "Detection limits", "How to reproduce"):
        assert f"## {heading}\n" in text


def test_the_picture_is_drawn_alike_every_time(proof):
    pictures = draw([fp32(proof)])
    assert pictures["png"].startswith(b"\x89PNG")
    assert b"<svg" in pictures["svg"]
    assert draw([fp32(proof)])["png"] == pictures["png"]
    assert draw([fp32(replace(proof, bugs=()))]) == {}
    assert len(draw([fp32(proof), in_regime(Regime.BF16, proof)])["png"]) > len(pictures["png"])


def test_a_part_without_bugs_is_a_page_too(report):
    only = proof_of(report)
    assert "1 of 1 pass" in page([fp32(only)], part=True, generated="now")
    assert all(goal.met for goal in goals(only, part=True))
    (written,) = document([fp32(only)], part=True, generated="now")["regimes"]
    assert math.isfinite(written["cost"]["rank_seconds"])


def with_effect(proof: Proof, **effects: Effect) -> Proof:
    """The same as if bugs had been measured against a reference in float32."""
    bugs = [
        replace(
            each,
            graded=replace(
                each.graded,
                answer=replace(each.graded.answer, effect=effects.get(each.graded.bug.id)),
            ),
        )
        for each in proof.bugs
    ]
    return replace(proof, bugs=tuple(bugs))


SMALL = Effect(error=1.1, scale=0.3, loss=0.2)


def test_what_is_below_rounding_is_listed_with_its_number_and_does_not_count(report):
    missed = replace(SILENT, kind="C4")
    counted = proof_of(report, QUIET, missed)
    told = with_effect(counted, silent=SMALL)
    goal, same = (goals(each, part=False, regime=Regime.BF16)[0] for each in (told, counted))
    assert (goal.met, goal.measured) == (True, "1 of 1 (100%); below rounding (silent)")
    assert (same.met, same.measured) == (False, "1 of 2 (50%) (silent)")
    for result, words in (
        (told, "below rounding, not caught (PASS)"),
        (told, "error of gradients 1.10 x the matched control's; of what rounding may do, length"),
        (counted, ") not caught (PASS)"),
    ):
        assert words in page([in_regime(Regime.BF16, result)], part=False, generated="now")
    written = document([in_regime(Regime.BF16, told)], part=False, generated="now")["regimes"][0]
    assert written["totals"]["below_rounding"] == 1
    assert written["bugs"][1]["effect"] == {"error": 1.1, "scale": 0.3, "loss": 0.2}


def test_the_worst_misses_come_first(report):
    bugs = (
        replace(SILENT, id="silent", kind="C1"),
        replace(QUIET, causes=(CauseClass.STATE,)),
        LOUD,
    )
    proof = proof_of(report, *bugs)
    large, small = Effect(error=5.0, scale=0.3, loss=None), SMALL
    assert proof.misses[0].graded.bug.id == "silent"
    assert with_effect(proof, silent=large).misses[0].graded.bug.id == "silent"
    assert with_effect(proof, silent=small).misses[-1].graded.bug.id == "silent"


@pytest.mark.parametrize(
    ("regime", "texts"),
    [
        (Regime.FP32, ["every bug of C1 to C6 is caught", "at least 95% of the caught"]),
        (Regime.MIXED, ["at least 97% of the bugs of C1 to C6", "at least 90% of the caught"]),
        (Regime.BF16, ["at least 95% of the bugs of C1 to C6", "at least 85% of the caught"]),
        (Regime.FLOAT8, ["at least 90% of the bugs of C1 to C6", "at least 80% of the caught"]),
    ],
)
def test_each_regime_has_its_goals(proof, regime, texts):
    found = [goal.text for goal in goals(proof, part=False, regime=regime)]
    assert all(any(text in each for each in found) for text in texts)
    assert "no false alarm on correct set-ups" in found
    assert len(found) == (5 if regime is Regime.FP32 else 3)


@pytest.mark.parametrize(
    ("lowest", "caught", "met"),
    [(1e-4, [True, False], [False]), (1e-4, [True, True], [True]), (1e-2, [True, True], [])],
)
def test_a_detection_limit_is_a_goal_where_its_ladder_reaches(proof, lowest, caught, met):
    (ladder,) = proof.ladders
    rungs = [
        replace(
            rung,
            graded=replace(
                rung.graded,
                bug=replace(rung.graded.bug, magnitude=size),
                answer=replace(rung.graded.answer, caught=seen),
            ),
        )
        for rung, size, seen in zip(ladder.rungs, (1e-1, lowest), caught, strict=True)
    ]
    named = replace(proof, ladders=(replace(ladder, name="gradient_scale", rungs=tuple(rungs)),))
    found = goals(named, part=False, regime=Regime.MIXED)
    assert [goal.met for goal in found if goal.key == "gradient_scale"] == met


def test_regimes_stand_side_by_side(proof):
    results = [fp32(proof), in_regime(Regime.FLOAT8, proof)]
    command = "nox -s prove -- --regime fp32 --regime float8"
    text = page(results, part=False, generated="now", command=command)
    assert_tables_whole(text)
    assert "| rule | from | fp32: bugs caught | fp32: false alarms | Float8: bugs caught |" in text
    assert "## Float8\n" in text
    assert "- it runs in eager only: `compiled`" in text
    assert f"$ {command}\n" in text
    assert "| Float8 | 13 | 260 | 100 | 1.5 |" in text
