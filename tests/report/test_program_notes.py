"""What a report says of programs of the user's: how far it could look, and what differs."""

from dataclasses import replace
from pathlib import Path

from report_samples import evidence, job, spec

from harness.model import Command, Experiment, Judgement, Plan, Role, RunRecord, RunStatus, Verdict
from harness.report import build_view

PROBE = {"wrapping": "DDP", "gradients": "at the optimizer's step", "recomputes_loss": False}


def view_of(evidences, *, probed):
    command = Command(("train.py",), Path("/work"), probed=probed)
    one = replace(spec("one"), command=command, overrides={"zero.stage": 0})
    two = replace(spec("two"), command=command, overrides={"zero.stage": 2}, control="one")
    jobs = (job(one, Role.CONTROL, 20), job(two, Role.TEST, 20))
    experiment = Experiment("x", Path("x.toml"), (one,), (two,))
    records = [
        RunRecord(each.name, each.identity, Path("runs"), RunStatus.FINISHED, 1.0, ("train.py",))
        for each in jobs
    ]
    verdict = Verdict("two", "one", Judgement.PASS)
    plan = Plan(experiment, jobs)
    return build_view(
        title="x", verdicts=[verdict], evidences=evidences, subject=plan, records=records
    )


def test_curves_alone_are_told_with_what_the_file_changes():
    view = view_of([evidence("one", 20), evidence("two", 20)], probed=False)
    (note,) = (note for note in view.notes if note.startswith("Curves only"))
    assert "Gradients, weights, optimizer state" in note
    (test,) = view.tests
    changed = [(each.control, each.test) for each in test.config if each.key == "zero.stage"]
    assert changed == [("0", "2")]
    assert test.run.command == "converge run x.toml --only two --fresh"


def test_curves_without_a_common_signal_are_told_to_compare_nothing():
    runs = [evidence("one", 20), replace(evidence("two", 20), signals={})]
    (note,) = (note for note in view_of(runs, probed=False).notes if note.startswith("Curves"))
    assert note.endswith("nothing was compared (trainer.probe, trainer.columns).")


def test_a_probe_that_saw_less_is_told():
    seen = {"probe": PROBE, "config": {}}
    runs = [evidence(name, 20, in_force=seen) for name in ("one", "two")]
    view = view_of(runs, probed=True)
    assert any("was given no logits in one, two" in note for note in view.notes)
    assert any("taken at the optimizer's step" in note for note in view.notes)
    (test,) = view.tests
    assert "wrapped by" in [row.what for row in test.in_force]


def test_a_probe_that_saw_all_needs_no_note():
    whole = {**PROBE, "gradients": "before clipping", "recomputes_loss": True}
    runs = [evidence(name, 20, in_force={"probe": whole}) for name in ("one", "two")]
    assert not any("probe" in note for note in view_of(runs, probed=True).notes)
