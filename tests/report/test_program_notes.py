"""What a report says of programs of the user's: how far it could look, and what differs."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import build_view, evidence, job, spec

from converge_harness.model import Experiment, Judgement, Plan, Role, RunRecord, RunStatus, Verdict
from converge_harness.readers.run_folder.documents import in_force_of
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command

PROBE = {"wrapping": "DDP", "gradients": "at the optimizer's step", "recomputes_loss": False}


def view_of(evidences, *, probed, seq_len=256):
    """The first of ``evidences`` is the control's, every other one a test set's."""
    trainer = trained_by(Command(("train.py",), Path("/lab"), probed=probed))
    control, *tests = (each.name for each in evidences)
    one = replace(spec(control), trainer=trainer, overrides={"zero.stage": 0})
    others = tuple(
        replace(spec(name), trainer=trainer, overrides={"zero.stage": 2}, control=control)
        for name in tests
    )
    jobs = (job(one, Role.CONTROL, 20), *(job(each, Role.TEST, 20) for each in others))
    jobs = tuple(replace(each, seq_len=seq_len) for each in jobs)
    experiment = Experiment("x", Path("x.toml"), (one,), others)
    records = [
        RunRecord(each.name, each.identity, Path("runs"), RunStatus.FINISHED, 1.0, ("train.py",))
        for each in jobs
    ]
    return build_view(
        title="x",
        verdicts=[Verdict(name, control, Judgement.PASS) for name in tests],
        evidences=evidences,
        subject=Plan(experiment, jobs),
        records=records,
    )


def test_curves_alone_are_noted_with_what_the_file_changes():
    view = view_of([evidence("one", 20), evidence("two", 20)], probed=False)
    (note,) = (note for note in view.notes if note.startswith("Curves only"))
    assert "Gradients, weights, optimizer state" in note
    (test,) = view.tests
    changed = [(each.control, each.test) for each in test.config if each.key == "zero.stage"]
    assert changed == [("0", "2")]
    assert test.run.command == "converge run x.toml --only two --fresh"


def test_of_curves_without_a_common_signal_nothing_is_compared_and_a_note_says_so():
    runs = [evidence("one", 20), replace(evidence("two", 20), signals={})]
    (note,) = (note for note in view_of(runs, probed=False).notes if note.startswith("Curves"))
    assert note.endswith("nothing was compared, and the causes say why.")


def test_a_set_without_a_signal_does_not_hide_what_the_others_were_compared_by():
    signals = {"loss": evidence("one", 20).signals["loss"]}
    runs = [replace(evidence(name, 20), signals=signals) for name in ("one", "two", "three")]
    runs[2] = replace(runs[2], signals={})
    (note,) = (note for note in view_of(runs, probed=False).notes if note.startswith("Curves"))
    assert "only the loss of 3 runs was compared" in note


def test_a_probe_that_saw_less_is_noted():
    seen = in_force_of({"probe": PROBE})
    runs = [evidence(name, 20, in_force=seen) for name in ("one", "two")]
    view = view_of(runs, probed=True)
    assert any("The probe got no logits in one, two" in note for note in view.notes)
    assert any("taken at the optimizer's step" in note for note in view.notes)
    (test,) = view.tests
    assert "wrapped by" in [row.what for row in test.in_force]


def test_a_probe_that_saw_all_needs_no_note():
    whole = {**PROBE, "gradients": "before clipping", "recomputes_loss": True}
    runs = [evidence(name, 20, in_force=in_force_of({"probe": whole})) for name in ("one", "two")]
    assert not any("probe" in note for note in view_of(runs, probed=True).notes)


def test_tokens_per_step_of_a_program_are_those_that_its_probe_counted():
    counted = [
        replace(each, signals={**each.signals, "tokens": (510.0,) * 19 + (512.0,)})
        for each in (evidence("one", 20), evidence("two", 20))
    ]
    view = view_of(counted, probed=True)
    assert {each.tokens_per_step for each in (*view.controls, *(t.run for t in view.tests))} == {
        510
    }
    uncounted = [
        replace(each, signals={"loss": each.signals["loss"]})
        for each in (evidence("one", 20), evidence("two", 20))
    ]
    sequences = view_of(uncounted, probed=False).controls[0]
    assert sequences.tokens_per_step == 8 * 256  # its config has the length of sequences
    samples = view_of(uncounted, probed=False, seq_len=1).controls[0]
    assert samples.tokens_per_step is None


@pytest.mark.parametrize(("seq_len", "shown"), [(1, None), (256, 8)])
def test_samples_that_a_probe_counted_are_not_called_tokens(seq_len, shown):
    runs = [
        replace(each, signals={**each.signals, "tokens": (8.0,) * 20})
        for each in (evidence("one", 20), evidence("two", 20))
    ]
    assert view_of(runs, probed=True, seq_len=seq_len).controls[0].tokens_per_step == shown
