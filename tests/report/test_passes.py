"""Runs in several passes, in every report."""

import re
from dataclasses import replace

import numpy as np
import pytest
from junitparser import JUnitXml
from markdown_it import MarkdownIt
from pass_samples import SPECS, STARTED, battered, killed, resized, resumed_view
from report_samples import HOSTILE, build_view, evidence, job, sample_view, spec

from converge_harness.judge import compare_runs
from converge_harness.model import (
    Check,
    Fault,
    FaultKind,
    Judgement,
    Kind,
    Outcome,
    Pass,
    Plan,
    Recovery,
    Role,
    Struck,
    Tier,
    Torn,
    Verdict,
)
from converge_harness.report import columns, rows
from converge_harness.report.renderers.figures import Figures
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.json_document import document
from converge_harness.report.renderers.junit import to_junit
from converge_harness.report.renderers.markdown import to_markdown
from converge_harness.report.renderers.marks import Mark, MarkKind, marks
from converge_harness.report.renderers.plots import draw
from converge_harness.report.view.resumed_run import degrees_of, fault_cells, passes_view

WIDE = 1000
RESIZED, KILLED, BATTERED, _ = SPECS


def lines(view) -> list[tuple[float, str, MarkKind]]:
    return [(mark.step, mark.text, mark.kind) for mark in marks(view, WIDE)]


# ------------------------------------------------------------------ the view


def test_the_passes_of_a_killed_run_are_told_apart():
    view = passes_view(killed(), KILLED)
    first, second = view.passes
    assert (first.steps, first.ended, first.started_from) == (
        (1, 6),
        "struck by kill",
        "initial weights",
    )
    assert (second.steps, second.ended, second.started_from) == ((5, 20), "ended", "step 4")
    assert (first.replayed, second.replayed) == (0, 2)
    assert (first.wall_s, first.recovery_s) == (pytest.approx(3.0), None)
    assert view.summary == (
        "One curve of 2 passes; 2 steps were trained again, and what the last pass left is judged."
    )


def test_what_a_later_pass_trained_again_is_kept_beside_the_curve():
    first, second = passes_view(killed(), KILLED).passes
    assert tuple(first.superseded["loss"].steps) == (5, 6)
    merged = killed().signals["loss"].values[4:6]
    assert first.superseded["loss"].values == pytest.approx(merged * 1.002)
    assert second.superseded == {}


def test_what_a_later_pass_trained_again_is_drawn_beside_the_control_as_the_judge_compared_it():
    control = evidence("c", 20)
    compared = compare_runs(killed(), control)
    first, second = passes_view(killed(), KILLED, compared.superseded_curves).passes
    left, theirs = first.superseded["loss"].values, control.signals["loss"].values[4:6]
    apart = first.superseded_against["loss"]
    assert tuple(apart.difference.steps) == (5, 6)
    assert apart.difference.values == pytest.approx((left - theirs) / np.minimum(left, theirs))
    assert apart.ratio.values == pytest.approx(left / theirs)
    assert second.superseded_against == {}


def test_recovery_is_from_the_fault_to_the_first_step_after_the_one_it_struck():
    view = passes_view(killed(), KILLED)
    assert view.faults[0].recovery_s == view.passes[1].recovery_s == pytest.approx(6.75)
    # Steps before the one that is struck are no recovery.
    whole = killed()
    early = replace(whole, struck=(replace(whole.struck[0], at=STARTED + 1.1),))
    assert passes_view(early, KILLED).faults[0].recovery_s > 6.75
    # Nor is the step that was struck, even if it ends.
    last = replace(whole, struck=(replace(whole.struck[0], step=6, at=STARTED + 2.9),))
    assert passes_view(last, KILLED).faults[0].recovery_s > 6.75
    # Which pass was struck follows from the time where nothing tells it.
    unnumbered = replace(whole, struck=(replace(whole.struck[0], number=None),))
    assert passes_view(unnumbered, KILLED) == passes_view(whole, KILLED)
    # Nor is there one in a run that never went on.
    dead = replace(whole, passes=whole.passes[:1])
    (fault,) = passes_view(dead, KILLED).faults
    assert (fault.at_pass, fault.recovery_s) == (1, None)


def test_a_pass_that_left_nothing_and_a_fault_that_did_not_strike_are_shown_as_such():
    view = passes_view(battered(), BATTERED)
    unborn = view.passes[2]
    assert (unborn.degrees, unborn.steps, unborn.ended) == ("2 ranks", None, "died")
    assert [fault_cells(fault)[0] for fault in view.faults] == [
        "1: ckpt torn (death)",
        "2: agent loss, node 1",
        "3: nan batch, rank 0",
        "4: join",
    ]
    assert [fault.fate for fault in view.faults] == [
        "pass 1, tore the checkpoint",
        "pass 2",
        "pass 4",
        "did not strike",
    ]


def test_a_fault_names_the_rank_that_it_really_struck():
    """Of a torn checkpoint only where one shard is cut short; without a script, what it left."""
    cut = Fault(FaultKind.CKPT_TORN, 4, rank=1, torn=Torn.TRUNCATED)
    whole, recovery = killed(), KILLED.recovery
    torn = replace(whole, struck=(Struck(0, "ckpt_torn", 4, STARTED + 2.1, 1, torn=True, rank=0),))
    for script, text in ((cut, "ckpt torn (truncated), rank 0"), (None, "ckpt torn")):
        named = replace(KILLED, recovery=replace(recovery, faults=(script,))) if script else None
        assert [fault.details for fault in passes_view(torn, named).faults] == [text]
    other = replace(whole, struck=(replace(whole.struck[0], rank=3),))
    assert passes_view(other, KILLED).faults[0].details == "kill, rank 3"


def test_a_pass_that_a_joining_node_ended_was_not_struck():
    whole = killed()
    joined = replace(whole, struck=(replace(whole.struck[0], kind="join"),))
    assert passes_view(joined, None).passes[0].ended == "ended: a node joined"
    both = replace(whole, struck=(*whole.struck, replace(joined.struck[0], index=1)))
    assert passes_view(both, None).passes[0].ended == "struck by kill, a node joined"


def test_the_degrees_of_a_run_without_a_plan_are_those_of_its_passes():
    verdicts = [Verdict(name, "c", Judgement.PASS) for name in ("resized", "killed", "battered")]
    found = [resized(), killed(), battered(), evidence("c", 20)]
    view = build_view(title="t", verdicts=verdicts, evidences=found)
    assert {test.run.name: (test.run.degrees, test.kind) for test in view.tests} == {
        "resized": ("FSDP 2 -> one rank -> FSDP 2 x PP 2", Kind.ELASTIC),
        "killed": ("FSDP 2, kill at 7", Kind.FAULT),
        "battered": (
            "FSDP 4 -> FSDP 2, ckpt torn at 4, agent loss at 7, nan batch at 10",
            Kind.FAULT,
        ),
    }


def test_degrees_of_a_pass_are_those_in_force_else_those_of_its_segment():
    whole = resized()
    silent = replace(whole, passes=tuple(replace(each, in_force=None) for each in whole.passes))
    expected = ["FSDP 2", "one rank", "FSDP 2 x PP 2"]
    for seen in (whole, silent):
        assert [each.degrees for each in passes_view(seen, RESIZED).passes] == expected


def test_a_run_in_one_piece_has_no_passes():
    assert passes_view(evidence("plain", 5), None) is None
    assert passes_view(None, KILLED) is None


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (RESIZED, "FSDP 2 -> one rank -> FSDP 2 x PP 2"),
        (KILLED, "FSDP 2, kill at 7"),
        (BATTERED, "FSDP 4, ckpt torn at 4, agent loss at 7, nan batch at 10, and 1 more"),
        (spec("st", dp_shard=2, kind=Kind.SPACE_TIME), "FSDP 2, accumulation 1"),
        (
            spec(
                "st",
                dp_shard=2,
                kind=Kind.SPACE_TIME,
                overrides={"parallelism.fsdp_reshard_after_forward": "never"},
            ),
            "FSDP 2 (ZeRO-2), accumulation 1",
        ),
        (spec("plain", dp_shard=2), "FSDP 2"),
    ],
)
def test_the_degrees_say_what_a_set_goes_through(one, text):
    assert degrees_of(job(one, Role.TEST, 20)) == text


def test_a_check_of_resumes_that_had_nothing_to_ask_is_no_missing_evidence_and_no_row():
    def asked(tier: Tier, name: str):
        check = Check(name, f"Title of {name}.", tier, Outcome.SKIPPED)
        return build_view(
            title="t",
            verdicts=[Verdict("killed", "fsdp2", Judgement.PASS, checks=(check,))],
            subject=Plan(None, (job(KILLED, Role.TEST, 20),)),
        )

    resume, other = asked(Tier.RESUME, "segments"), asked(Tier.INTEGRITY, "digests")
    assert (resume.without_evidence, other.without_evidence) == ((), ("digests",))
    assert resume.headline == "1 test set: agrees with the control."
    for render in (to_markdown, to_html):
        assert "Title of segments." not in render(resume)
        assert "Title of digests." in render(other)
    # Programs are told of every check.
    assert [check["name"] for check in document(resume)["tests"][0]["checks"]] == ["segments"]


def test_a_run_in_passes_is_made_again_by_the_harness_in_a_folder_of_its_own():
    """torchrun's own command is that of one pass, in a folder whose faults have struck."""
    again = "converge run experiments/faults.toml --only {} --fresh"
    commands = {test.run.name: test.run.command for test in resumed_view().tests}
    plain = commands.pop("plain")
    assert plain.startswith("torchrun ")
    assert commands == {name: again.format(name) for name in ("resized", "killed", "battered")}
    for render in (to_markdown, to_html):
        assert again.format("killed") in render(resumed_view())


# ------------------------------------------------------------------ the lines


def test_a_planned_border_names_the_degrees_on_both_sides():
    assert lines(passes_view(resized(), RESIZED)) == [
        (7.5, "FSDP 2 -> one rank", MarkKind.BORDER),
        (14.5, "one rank -> FSDP 2 x PP 2", MarkKind.BORDER),
    ]


def test_faults_and_restarts_stand_where_they_were():
    assert lines(passes_view(killed(), KILLED)) == [
        (4.5, "restart from 4", MarkKind.RESTART),
        (7.0, "kill", MarkKind.FAULT),
    ]


def test_of_several_faults_each_has_a_number_that_its_restart_names():
    """A restart on fewer ranks says so; a pass that loaded nothing is none."""
    assert lines(passes_view(battered(), BATTERED)) == [
        (0.5, "after 1: from the initial weights", MarkKind.RESTART),
        (4.0, "1: ckpt torn", MarkKind.FAULT),
        (4.5, "after 2: from step 4, FSDP 4 -> FSDP 2", MarkKind.RESTART),
        (7.0, "2: agent loss", MarkKind.FAULT),
        (8.5, "after 3: from step 8", MarkKind.RESTART),
        (10.0, "3: nan batch", MarkKind.FAULT),
    ]


def test_the_same_place_is_marked_once():
    whole = killed()
    again = replace(whole.passes[0], number=2, loaded_step=4)
    twice = replace(whole, passes=(whole.passes[0], again, replace(whole.passes[1], number=3)))
    assert (4.5, "restart from 4 (2x)", MarkKind.RESTART) in lines(passes_view(twice, KILLED))


@pytest.mark.parametrize("characters", [20, 54, 120])
def test_labels_of_a_row_never_overlap_nor_leave_the_figure(characters):
    found = marks(passes_view(battered(), BATTERED), characters)
    per_character = 20 / characters

    def span(mark: Mark) -> tuple[float, float]:
        width = len(mark.text) * per_character
        return (mark.step - width, mark.step) if mark.leftwards else (mark.step, mark.step + width)

    for mark in found:
        left, right = span(mark)
        assert left >= 0
        assert right <= 20 or mark.step < (len(mark.text) + 2) * per_character
        for other in found:
            if other is not mark and other.row == mark.row:
                assert span(other)[1] <= left or span(other)[0] >= right


# ------------------------------------------------------------------ renderers


def test_the_verdict_table_shows_what_each_set_goes_through():
    shown = {row.name: row.degrees for row in rows(resumed_view())}
    assert shown["resized"] == "FSDP 2 -> one rank -> FSDP 2 x PP 2"
    assert shown["killed"] == "FSDP 2, kill at 7"
    assert shown["plain"] == "FSDP 2"
    assert columns(resumed_view())["degrees"] == "degrees, events"
    assert columns(sample_view())["degrees"] == "degrees"
    for render in (to_markdown, to_html):
        assert "Degrees, events" in render(resumed_view())
        assert "Degrees, events" not in render(sample_view())


def test_markdown_has_a_table_of_passes_and_one_of_faults():
    text = to_markdown(resumed_view())
    dash = "&#8211;"
    assert (
        f"| 1 | FSDP 2 | 2 | 1{dash}6 | initial weights | struck by kill | 3.0 s | {dash} | 0 |"
    ) in text
    assert f"| 2 | FSDP 2 | 2 | 5{dash}20 | step 4 | ended | 8.0 s | 6.8 s | 2 |" in text
    assert "| kill, rank 1 | 7 | pass 1 | 6.8 s |" in text
    assert text.count("| Pass | Degrees |") == 3
    assert text.count("| Fault | Step |") == 2
    page = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)
    assert "FSDP 2 -&gt; one rank" in page


def test_html_has_the_tables_and_the_tier():
    page = to_html(resumed_view())
    sections = dict(
        re.findall(r'<section class="set" id="set-(\w+)"(.*?)</section>', page, re.DOTALL)
    )
    assert '<td class="number">struck by kill</td>' in sections["killed"]
    assert '<td class="number">did not strike</td>' in sections["battered"]
    assert "<h3>Passes</h3>" in sections["resized"]
    assert "FSDP 2 -&gt; one rank -&gt; FSDP 2 x PP 2" in sections["resized"]
    assert '<tr class="tier"><th scope="rowgroup" colspan="6">resume</th></tr>' in page
    assert "Passes" not in sections["plain"]


def test_the_configuration_that_is_shown_of_a_run_in_passes_is_that_of_its_first():
    titles = {test.run.name: test.configured for test in resumed_view().tests}
    assert titles["killed"] == titles["resized"] == "Test, first pass"
    assert titles["plain"] == "Test"


def test_figures_of_a_set_have_its_lines_replays_and_resumes_and_the_overview_none():
    figures = Figures(resumed_view()).payload()["figures"]
    for name in ("loss", "difference-loss", "difference-grad_norm", "ratio"):
        figure = figures[f"set-killed-{name}"]
        assert [mark["text"] for mark in figure["marks"]] == ["restart from 4", "kill"]
        (replay,) = (trace for trace in figure["traces"] if trace["name"] == "replayed")
        assert (replay["hover"], replay["stroke"]) == ("pass 1, replayed", "dot")
    names = [trace["name"] for trace in figures["set-killed-loss"]["traces"]]
    assert names == ["control fsdp2", "killed", "replayed", "resumed"]
    listed = [t for t in figures["set-battered-loss"]["traces"] if t["name"] == "replayed"]
    assert [trace["unlisted"] for trace in listed] == [False, True, True]
    for name, figure in figures.items():
        if name.startswith(("overview-", "set-plain-")):
            assert "marks" not in figure
            assert not {"replayed", "resumed"} & {trace["name"] for trace in figure["traces"]}


def test_a_set_in_passes_has_a_picture_of_its_own():
    drawn = draw(resumed_view())
    assert {name for name in drawn if name.startswith("passes-")} == {
        f"passes-{name}.{form}"
        for name in ("resized", "killed", "battered")
        for form in ("png", "svg")
    }
    assert all(drawn[name].startswith(b"\x89PNG") for name in drawn if name.endswith("png"))


def test_json_has_kind_passes_and_faults():
    tests = {test["name"]: test for test in document(resumed_view())["tests"]}
    assert {name: test["kind"] for name, test in tests.items()} == {
        "resized": "elastic",
        "killed": "fault",
        "battered": "fault",
        "plain": "parallel",
    }
    second = tests["killed"]["passes"][1]
    assert (second["number"], second["degrees"], second["world_size"]) == (2, "FSDP 2", 2)
    assert (second["steps"], second["loaded_step"], second["ended"]) == ([5, 20], 4, "ended")
    assert second["recovery_s"] == tests["killed"]["faults"][0]["recovery_s"]
    nan = tests["battered"]["faults"][2]
    assert (nan["kind"], nan["step"], nan["at_pass"], nan["struck"]) == ("nan_batch", 10, 4, True)
    assert (tests["plain"]["passes"], tests["plain"]["faults"]) == ([], [])


def test_junit_has_them_as_properties_of_the_suite():
    suites = {suite.name: suite for suite in JUnitXml.fromstring(to_junit(resumed_view()))}
    properties = {each.name: each.value for each in suites["killed"].properties()}
    assert properties["kind"] == "fault"
    assert properties["pass 1"].endswith("started from initial weights, struck by kill")
    assert properties["fault 1"] == "kill, rank 1 at step 7: pass 1, recovered in 6.8 s"
    assert {each.name for each in suites["plain"].properties()} == {"verdict", "control"}


def test_reports_of_runs_in_one_piece_are_what_they_were():
    alone, beside = sample_view(), resumed_view()
    beside = replace(alone, tests=(*alone.tests, *beside.tests[:1]))
    details = re.compile(r"<details>\n<summary>. \w+ ddp2</summary>.*?</details>", re.DOTALL)
    assert details.findall(to_markdown(alone)) == details.findall(to_markdown(beside)) != []
    assert not any(name.startswith("passes-") for name in draw(alone))
    assert "| Pass |" not in to_markdown(alone)
    assert "<h3>Passes</h3>" not in to_html(alone)
    assert not any("marks" in figure for figure in Figures(alone).payload()["figures"].values())
    assert b'name="kind"' not in to_junit(alone)


def test_hostile_kinds_of_faults_are_inert():
    died = Pass(
        number=1,
        segment=None,
        world_size=2,
        loaded_step=0,
        started=None,
        steps=np.array([1]),
        signals={},
        batch_digests=(None,),
        ended=False,
    )
    whole = evidence(
        HOSTILE,
        8,
        passes=(died, replace(died, number=2, steps=np.arange(1, 9), ended=True)),
        struck=(Struck(0, f"{HOSTILE}\x1b[31m\u202e", 1, 0.0, 1),),
    )
    one = replace(
        spec(HOSTILE, dp_shard=2),
        kind=Kind.FAULT,
        recovery=Recovery((Fault(FaultKind.KILL, 1),), 4),
    )
    view = build_view(
        title="t",
        verdicts=[Verdict(HOSTILE, "c", Judgement.PASS)],
        evidences=[whole, evidence("c", 8)],
        subject=Plan(None, (job(one, Role.TEST, 8),)),
    )
    page = to_html(view)
    assert "<img" not in page
    assert "<script>window" not in page
    (fault,) = Figures(view).payload()["figures"][f"{view.tests[0].run.anchor}-loss"]["marks"][1:]
    assert "<" not in fault["text"]
    assert "<img" not in MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(
        to_markdown(view)
    )
    assert draw(view)
