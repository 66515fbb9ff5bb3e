"""Runs that a scheduler interrupted, refused or ended, as reports show them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from junitparser import JUnitXml
from pass_samples import STARTED, STEPS, one_pass
from report_samples import CONFIG, TOOLCHAIN, build_view, evidence, in_force, job, record, spec

from converge_harness.judge import judge
from converge_harness.model import (
    Cluster,
    Experiment,
    Kind,
    Launcher,
    Parallelism,
    Plan,
    RankError,
    Recovery,
    RestartOwner,
    Role,
    RunStatus,
    SetSpec,
)
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.json_document import document
from converge_harness.report.renderers.junit import to_junit
from converge_harness.report.renderers.markdown import to_markdown
from converge_harness.report.renderers.marks import MarkKind, marks
from converge_harness.report.renderers.plots import draw
from converge_harness.report.renderers.verdict_table import columns, rows
from converge_harness.report.view.resumed_run import degrees_of, kind_seen, passes_view
from converge_harness.trainers.torchtitan import TORCHTITAN

CLUSTER = Recovery((), checkpoint_every=4, restarts=RestartOwner.CLUSTER)
FSDP2 = Parallelism(dp_shard=2)
CONTROL = SetSpec("fsdp2", FSDP2, CONFIG, TOOLCHAIN.name, recovery=CLUSTER, trainer=TORCHTITAN)
TEST = spec("moved", dp_shard=2, recovery=CLUSTER)
SAID = "TIMEOUT: 60 s (the job's time limit) on node1; raise [cluster] time"


def requeued(name: str, **changes):
    """Interrupted after step 6; goes on from step 4 two minutes later."""
    whole = evidence(name, STEPS, in_force=in_force(TEST))
    passes = (
        one_pass(1, whole, range(1, 7), STARTED, FSDP2, ended=False),
        one_pass(2, whole, range(5, STEPS + 1), STARTED + 120, FSDP2),
    )
    changes = {"passes": passes, "replayed": (5, 6), **changes}
    return replace(whole, restarts=RestartOwner.CLUSTER, **changes)


def view_of(control, test, *, status=RunStatus.FINISHED, error=None):
    jobs = (job(CONTROL, Role.CONTROL, STEPS), job(TEST, Role.TEST, STEPS))
    test = replace(test, status=status, error=error)
    records = [record(jobs[0], 20.0), replace(record(jobs[1], 60.0), status=status, error=error)]
    return build_view(
        title="cluster",
        verdicts=[judge(test, control).verdict],
        evidences=[control, test],
        subject=Plan(Experiment("cluster", Path("e.toml"), (CONTROL,), (TEST,)), jobs),
        records=records,
    )


@pytest.fixture(scope="module")
def view():
    return view_of(requeued("fsdp2"), requeued("moved"))


def valid(view):
    """The JSON document, which its schema allows."""
    found = json.loads(json.dumps(document(view)))
    schema = json.loads(
        resources.files("converge_harness.report").joinpath("report.schema.json").read_text()
    )
    jsonschema.validate(found, schema)
    return found


def test_the_passes_are_shown_without_a_script(view):
    resumed = view.tests[0].resumed
    assert [each.ended for each in resumed.passes] == ["interrupted", "ended"]
    assert [each.started_from for each in resumed.passes] == ["initial weights", "step 4"]
    assert resumed.faults == ()
    assert resumed.summary == (
        "One curve of 2 passes, interrupted and continued; 2 steps were trained "
        "again, and what the last pass left is judged."
    )
    (mark,) = marks(resumed, 1000)
    assert (mark.step, mark.text, mark.kind) == (4.5, "continued from 4", MarkKind.RESTART)
    for page in (to_html(view), to_markdown(view)):
        assert "2 passes, interrupted and continued" in page
        assert "It was interrupted and continued once." in page  # the control
        assert "| Fault |" not in page
    assert "passes-moved.png" in draw(view)


def test_reports_say_who_ran_the_jobs_elsewhere(view):
    cluster = Cluster(ranks_per_node=8, partition="gpu", hardware="H100")
    experiment = Experiment(
        "e", Path("e.toml"), (CONTROL,), (TEST,), launcher=Launcher.SLURM, cluster=cluster
    )
    elsewhere = build_view(title="e", verdicts=[], subject=Plan(experiment, ()))
    assert "Run by slurm on H100 (cuda), 8 ranks a node." in elsewhere.notes
    assert not any(note.startswith("Run by") for note in view.notes)


def test_json_tells_of_controls_too(view):
    found = valid(view)
    assert found["controls"][0]["requeues"] == 1
    (test,) = found["tests"]
    assert (test["kind"], test["requeues"], len(test["passes"]), test["faults"]) == (
        "parallel",
        1,
        2,
        [],
    )


def test_a_set_that_may_be_requeued_is_named_as_any_other(view):
    assert view.tests[0].run.degrees == "FSDP 2"
    assert view.tests[0].kind is kind_seen(requeued("moved")) is Kind.PARALLEL
    assert "degrees, events" not in columns(view).values()
    generated = replace(TEST, kind=Kind.SPACE_TIME)
    assert "accumulation" in degrees_of(job(generated, Role.TEST, STEPS))


def test_a_run_that_was_never_interrupted_shows_no_passes():
    whole = requeued("moved")
    one = replace(whole, passes=(one_pass(1, whole, range(1, STEPS + 1), STARTED, FSDP2),))
    assert passes_view(one, TEST) is None
    page = to_html(view_of(replace(one, name="fsdp2"), one))
    assert "<h3>Passes</h3>" not in page
    assert "interrupted and continued" not in page


def test_a_pass_that_nobody_resumed_died():
    dead = replace(requeued("moved"), passes=requeued("moved").passes[:1] * 2)
    assert [each.ended for each in passes_view(dead, TEST).passes] == ["died", "died"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RunStatus.TIMED_OUT, "the run ran into the time limit of its job"),
        (RunStatus.CANCELLED, "the run was cancelled"),
        (RunStatus.REFUSED, "the run was refused by the scheduler"),
    ],
)
def test_the_schedulers_words_are_shown_as_its_own(status, words):
    error = RankError(None, SAID, "slurmstepd: error: *** JOB 7 CANCELLED DUE TO TIME LIMIT ***")
    whole = evidence("fsdp2", STEPS, in_force=in_force(CONTROL))
    view = view_of(whole, requeued("moved"), status=status, error=error)
    assert rows(view)[0].cause == f"{words}: {SAID}"
    html, markdown, junit = to_html(view), to_markdown(view), to_junit(view)
    suites = {suite.name: suite for suite in JUnitXml.fromstring(junit)}
    text = str(next(case for case in suites["moved"] if case.name == "verdict").result[0].text)
    for page in (html, markdown, text):
        assert "JOB 7 CANCELLED DUE TO TIME LIMIT" in page
        assert "ank 0" not in page
        assert "None" not in page
    assert valid(view)["tests"][0]["error"] == {"rank": None, "message": SAID}
