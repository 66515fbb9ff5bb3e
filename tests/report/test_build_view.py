import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_samples import (
    FLOOR,
    HOSTILE,
    build_view,
    build_view_of,
    evidence,
    foreign_view,
    hostile_view,
    in_force,
    job,
    record,
    sample_view,
    spec,
)
from tensor_samples import NAMES, tensor_samples

from converge_harness.judge import calibrate, compare_runs
from converge_harness.judge.checks.precision import reference_sound
from converge_harness.model import (
    Calibration,
    Check,
    Evidence,
    Experiment,
    InForce,
    Judgement,
    Outcome,
    Plan,
    Precision,
    RankError,
    Role,
    RunStatus,
    Tier,
    Verdict,
)
from converge_harness.report import rows
from converge_harness.report.renderers.html_page import to_html
from converge_harness.report.renderers.json_document import document
from converge_harness.report.renderers.markdown import escape, to_markdown
from converge_harness.report.sanitize import from_here
from converge_harness.report.text import ABSENT
from converge_harness.report.view.in_force import config_changes, named_and_in_force, techniques_of
from converge_harness.report.view.report_view import SIGNAL_TITLES, Named, ReportView


def test_what_needs_a_person_comes_first():
    view = sample_view()
    words = [test.verdict.judgement for test in view.by_severity]
    assert words[:6] == [Judgement.FAIL] * 3 + [
        Judgement.ERROR,
        Judgement.INVALID,
        Judgement.INCONCLUSIVE,
    ]
    assert set(words[6:]) == {Judgement.PASS}
    assert view.worst is Judgement.FAIL
    assert view.headline == (
        "Of 12 test sets: 3 FAIL, 1 ERROR, 1 INVALID, 1 INCONCLUSIVE, 6 PASS "
        "(1 check had no evidence)."
    )


def test_a_view_gathers_what_every_stage_left():
    view = sample_view()
    assert view.entropy_floor == FLOOR
    assert view.waived == ("accumulation: rule 'same token budget' is waived",)
    assert [control.name for control in view.controls] == ["fsdp2"]
    assert [repeat.run.repeat for repeat in view.repeats] == [
        "rerun",
        "ulp",
        "ulp.2",
        "permute",
    ]
    ddp = next(test for test in view.tests if test.run.name == "ddp2")
    assert ddp.run.degrees == "DDP 2"
    assert ddp.run.command.startswith("torchrun --nproc-per-node 2 ")
    assert ddp.comparison("grad_norm").ratio.values[0] == pytest.approx(0.5)
    assert tuple(ddp.comparison("loss").limit.steps) == tuple(range(1, 21))
    assert ddp.loss_only.passes
    crashed = next(test for test in view.tests if test.run.name == "tp2_pp2_fsdp2")
    assert crashed.run.error.rank == 5
    assert crashed.loss_only is None


def test_paths_are_written_as_from_the_folder_in_which_commands_are_given():
    """A report that is published tells where in a checkout something lies, not on whose machine."""
    one, here = spec("a", dp_shard=2), Path("/home/ada lovelace/converge")
    made = job(one, Role.TEST, 8)
    runs = here / ".converge" / "runs"
    argv = (f"{here}/.toolchains/t/bin/python", f"--log-dir={runs}/a/logs", f"{runs}/a/job.json")
    dumped = {name: {"dump_folder": str(runs / name)} for name in ("a", "c")}
    view = build_view(
        title="t",
        verdicts=[
            Verdict("a", "c", Judgement.ERROR, next_command=f"grep -rn Error '{runs}/a/logs'")
        ],
        evidences=[
            replace(evidence(name, 8, in_force=InForce(config=seen)), source=str(runs / name))
            for name, seen in dumped.items()
        ],
        subject=Plan(Experiment("t", Path("t.toml"), (), (one,)), (made,)),
        records=[replace(record(made, 1.0), argv=argv)],
        here=here,
    )
    (test,) = view.tests
    assert shlex.split(test.run.command) == [
        ".toolchains/t/bin/python",
        "--log-dir=.converge/runs/a/logs",
        ".converge/runs/a/job.json",
    ]
    assert shlex.split(test.verdict.next_command)[-1] == ".converge/runs/a/logs"
    assert test.run.source == ".converge/runs/a"
    assert [(each.control, each.test) for each in test.config] == [
        (".converge/runs/c", ".converge/runs/a")
    ]
    for render in (to_markdown, to_html, lambda view: str(document(view))):
        assert "lovelace" not in render(view)


def test_releases_that_name_a_parameter_otherwise_are_shown_by_the_others():
    """What is judged of an upgrade is also drawn: its tables and map are not left out."""
    control, test = spec("c", dp_shard=2), spec("t", dp_shard=2)
    names = tuple("zz.weight" if name == "norm.weight" else name for name in NAMES)
    ours = evidence("t", 4, samples=tensor_samples("t", noise=1e-7, names=names))
    theirs = evidence("c", 4, samples=tensor_samples("c"))

    def shown(test):
        return build_view(
            title="t",
            verdicts=[Verdict("t", "c", Judgement.PASS)],
            evidences=[theirs, ours],
            subject=Plan(
                Experiment("t", Path("t.toml"), (control,), (test,)),
                (job(control, Role.CONTROL, 4), job(test, Role.TEST, 4)),
            ),
        ).tests[0]

    upgraded = shown(replace(test, toolchain="another release"))
    assert len(upgraded.gradients.names) == upgraded.tensors.parameters == len(NAMES) - 1
    same = shown(test)  # there another name is another model, and nothing can be compared
    assert (same.gradients, same.tensors) == (None, None)


def test_a_path_that_only_begins_alike_stays_whole():
    assert from_here("cat /data/a/x /data/ab/x /b/data/a/x", Path("/data/a")) == (
        "cat x /data/ab/x /b/data/a/x"
    )
    assert from_here("cat /dev/shm/x", Path("/")) == "cat /dev/shm/x"


def test_an_spmd_backend_is_a_technique_where_it_is_not_the_controls():
    control = spec("fsdp2", spmd_backend="spmd_types")
    other = spec("full", spmd_backend="full_dtensor")
    assert techniques_of(control, control) == ()
    assert techniques_of(other, control) == ("full_dtensor",)
    assert techniques_of(other) == ()
    ran = replace(in_force(other), spmd_backend="full_dtensor")
    seen = Evidence("full", "", (), {}, in_force=ran)
    assert Named("SPMD backend", "full_dtensor", "full_dtensor") in named_and_in_force(other, seen)


def test_named_and_in_force_stand_side_by_side():
    view = sample_view()
    test = next(test for test in view.tests if test.run.name == "fsdp2_cp2_alltoall")
    shown = {row.what: (row.named, row.in_force) for row in test.in_force}
    assert shown["CP rotation"] == ("alltoall", "allgather")
    assert shown["degrees"] == ("FSDP 2 x CP 2", "FSDP 2 x CP 2")


def test_degrees_in_force_are_written_as_the_named_ones():
    hsdp = spec("hsdp", dp_replicate=2, dp_shard=2)
    seen = Evidence("hsdp", "", (), {}, in_force=in_force(hsdp))
    assert named_and_in_force(hsdp, seen)[0] == Named("degrees", "HSDP 2x2", "HSDP 2x2")
    silent = Evidence("hsdp", "", (), {}, in_force=InForce())
    assert named_and_in_force(hsdp, silent) == (Named("degrees", "HSDP 2x2", ABSENT),)


@pytest.mark.parametrize(
    ("declared", "is_declared"), [([], False), (["optimizer"], True), (["optimizer.lr"], True)]
)
def test_a_declared_table_covers_its_keys_as_it_does_for_the_judge(declared, is_declared):
    def of(rate, keys):
        in_force = InForce(config={"optimizer.lr": rate}, declared=tuple(keys))
        return replace(evidence("r", 2), in_force=in_force)

    (change,) = config_changes(compare_runs(of(2.0, declared), of(1.0, [])))
    assert (change.key, change.declared) == ("optimizer.lr", is_declared)


def test_a_run_whose_configuration_is_not_recorded_has_no_differences():
    recorded, other = (
        replace(evidence("r", 2), in_force=InForce(config=config)) for config in ({"lr": 1.0}, {})
    )
    nothing = replace(other, in_force=None)
    assert config_changes(
        compare_runs(recorded, replace(other, in_force=InForce(config={"lr": 2})))
    )
    for unknown in (other, nothing):
        assert config_changes(compare_runs(recorded, unknown)) == ()
        assert config_changes(compare_runs(unknown, recorded)) == ()


def test_a_key_that_only_one_toolchain_has_is_as_declared_as_for_the_judge():
    runs = [
        replace(evidence("r", 2), in_force=InForce(config=config))
        for config in ({"training.lr": 1.0, "new": 1}, {"training.lr": 2.0, "old": 1})
    ]
    test, control = job(spec("t"), Role.TEST, 2), job(spec("c"), Role.CONTROL, 2)

    def undeclared(control):
        compared = compare_runs(*runs, spec=test.spec, control_spec=control.spec)
        found = config_changes(compared, test, control)
        return [each.key for each in found if not each.declared]

    assert undeclared(control) == ["new", "old", "training.lr"]
    older = replace(control, spec=replace(control.spec, toolchain="torchtitan-0.2.2"))
    assert undeclared(older) == ["training.lr"]


def test_undeclared_configuration_differences_come_first():
    view = sample_view()
    changes = {test.run.name: test.config for test in view.tests}
    assert [(change.key, change.declared) for change in changes["short_run"]] == [
        ("debug.deterministic", False)
    ]
    assert all(change.declared for change in changes["fsdp2_tp2"])
    assert changes["accumulation"] == ()


def test_foreign_curves_need_no_plan():
    view = foreign_view()
    (test,) = view.tests
    assert test.run.degrees == ""
    assert test.in_force == ()
    assert test.comparison("loss").difference.steps[0] == 10
    assert view.headline == "1 test set: agrees with the control."


def checked(**outcomes):
    return tuple(
        Check(name.replace("_", "-"), "Title.", Tier.ENVELOPE, outcome)
        for name, outcome in outcomes.items()
    )


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ({"grad_norm_envelope": Outcome.PASS}, "with the control."),
        ({"grad_norm_envelope": Outcome.SKIPPED}, "(loss only; 1 check had no evidence)."),
        (
            {"grad_norm_envelope": Outcome.PASS, "a": Outcome.SKIPPED, "b": Outcome.SKIPPED},
            "with the control (2 checks had no evidence).",
        ),
    ],
)
def test_the_headline_says_what_nothing_was_known_of(outcomes, words):
    checks = checked(loss_envelope=Outcome.PASS, **outcomes)
    view = build_view(title="t", verdicts=[Verdict("a", "c", Judgement.PASS, checks=checks)])
    assert view.headline.startswith("1 test set: agrees with the control")
    assert view.headline.endswith(words)


def learnt(taught_by, repeats=("c-rerun", "c-ulp", "c-ulp.2"), precision=Precision.FP32):
    return Calibration("c", None, precision, repeats, taught_by)


@pytest.mark.parametrize(
    ("precision", "calibration", "words"),
    [
        (Precision.FP32, learnt(3), None),
        (Precision.FP32, learnt(1), "1 repeat that differs from c cannot show how much correct"),
        (Precision.BF16, learnt(1), "Limits of bf16 against fp32 are coarse"),
        (
            Precision.FP32,
            learnt(0),
            "fitted on CPU debug models: its repeats are bit-identical",
        ),
        (
            Precision.FP32,
            None,
            "No repeat of c shows how much correct runs differ: without a margin",
        ),
    ],
)
def test_a_note_says_which_limits_were_not_learnt(precision, calibration, words):
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS)],
        evidences=[Evidence("c", "c", (), {}), Evidence("a", "a", (), {}, precision=precision)],
        calibrations={"c": calibration} if calibration else {},
    )
    if words is None:
        assert view.notes == ()
        return
    (note,) = view.notes
    assert words in note
    assert f"- {escape(note)}" in to_markdown(view)
    assert f"<li>{note}</li>" in to_html(view)
    assert document(view)["notes"] == [note]


@pytest.mark.parametrize(
    ("given", "decides"),
    [
        ({}, "without a margin or a tolerance only rounding passes"),
        ({"margin": 0.005}, ": the margin of 0.005 decides about the mean loss, and otherwise"),
        (
            {"tolerances": {"grad_norm": 0.1}},
            ": the tolerance of 0.1 decides about the grad norm of every step; otherwise only",
        ),
        ({"tolerances": {"lr": 0.1}}, "without a margin or a tolerance only rounding passes"),
    ],
)
def test_the_note_on_curves_without_repeats_names_what_was_given(given, decides):
    signals = {"loss": (3.0, 2.0), "grad_norm": (1.0, 1.0)}
    curves = [Evidence(name, name, (1, 2), signals) for name in "ca"]
    (note,) = build_view_of(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS)],
        evidences=curves,
        comparisons={"a": compare_runs(curves[1], curves[0], **given)},
    ).notes
    assert decides in note


def test_what_was_left_out_as_asked_is_in_the_report():
    runs = [Evidence(name, name, (1, 2), {"loss": (3.0, 2.0), "lr": (1, 1)}) for name in "ca"]
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS)],
        evidences=[each.without(["lr", "grad_norm"]) for each in runs],
    )
    assert view.notes[0].startswith("The lr of c, a was left out as asked (without):")


def test_columns_that_nobody_read_are_in_the_report():
    def notes(*overlooked):
        return build_view(
            title="t",
            verdicts=[Verdict("a", "c", Judgement.PASS)],
            evidences=[
                Evidence(name, name, (1, 2), {"loss": (3.0, 2.0)}, overlooked=each)
                for name, each in zip("ca", overlooked, strict=True)
            ],
        ).notes

    norm = {"grad_norm": ("g norm",)}
    assert notes(norm, norm)[0] == (
        "Not read in c, a: g norm; --columns 'grad_norm=g norm' reads g norm as the grad norm."
    )
    many = {"loss": ("aux_loss", "z_loss", "mtp_1_loss", "mtp_2_loss", "mtp_3_loss")}
    assert notes({}, many)[0] == (
        "Not read in a: aux_loss, z_loss, mtp_1_loss and 2 more; --columns loss=aux_loss reads "
        "aux_loss as the loss."
    )
    assert not any("Not read" in each for each in notes({}, {}))


def test_a_control_that_is_called_control_is_named_once():
    def note(control):
        verdict = Verdict("a", control, Judgement.PASS)
        runs = [Evidence(name, name, (), {}, in_force=InForce()) for name in (control, "a")]
        return build_view(title="t", verdicts=[verdict], evidences=runs).notes[0]

    assert note("control").startswith("Limits of sets against the control are fixed floors")
    assert note("ddp2").startswith("Limits of sets against the control ddp2 are fixed floors")


def test_runs_that_left_more_than_curves_are_held_to_floors_without_repeats():
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS)],
        evidences=[Evidence(name, name, (), {}, in_force=InForce()) for name in "ca"],
    )
    (note,) = view.notes
    assert "fixed floors, fitted on CPU debug models: no repeat shows" in note


def test_repeats_that_crashed_are_not_called_bit_identical():
    whole = evidence("c", 4)
    crashed = replace(whole.up_to(0), name="c.rerun", status=RunStatus.CRASHED, complete=False)

    def notes(repeat):
        view = build_view(
            title="t",
            verdicts=[Verdict("a", "c", Judgement.INVALID)],
            evidences=[whole, replace(whole, name="a")],
            calibrations={"c": calibrate(whole, [repeat])},
        )
        return [note for note in view.notes if "bit-identical" in note]

    assert notes(replace(whole, name="c.rerun"))
    assert not notes(crashed)


def test_pairs_of_one_coarse_precision_are_judged_by_their_calibration():
    runs = [Evidence(name, name, (), {}, precision=Precision.FLOAT8) for name in ("a", "c")]
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS)],
        evidences=runs,
        calibrations={"c": learnt(3, precision=Precision.FLOAT8)},
    )
    assert view.notes == ()


@pytest.mark.parametrize(("precision", "said"), [(Precision.BF16, True), (Precision.FP32, False)])
def test_a_note_says_that_errors_of_low_precision_have_no_reference(precision, said):
    test, control = (replace(evidence(name, 4), precision=precision) for name in ("a", "c"))
    check = reference_sound(compare_runs(test, control))
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS, checks=(check,))],
        evidences=[test, control],
    )
    notes = [note for note in view.notes if "low precision at the initial weights" in note]
    assert len(notes) == said
    assert all("are not measured from a reference in float32" in note for note in notes)


def test_the_tolerances_say_what_taught_them():
    (calibration,) = sample_view().calibrations
    assert (calibration.control, calibration.taught_by) == ("fsdp2", 3)
    assert [(repeat.kind, repeat.identical) for repeat in calibration.repeats] == [
        ("rerun", True),
        ("ulp", False),
        ("ulp.2", False),
        ("permute", False),
    ]
    rerun, ulp, *_ = calibration.repeats
    assert rerun.distance(rerun.loss) == "bit-identical"
    assert ulp.distance(ulp.loss) == "3.82e-7"
    assert calibration.sampled_steps == (1, 2, 4)
    growth = calibration.signals[0]
    assert (growth.signal, growth.steps) == ("loss", (1, 20))
    assert growth.scale[0] <= growth.scale[1] < 1e-6


def test_a_control_without_repeats_says_so():
    (calibration,) = foreign_view().calibrations
    assert calibration.summary == "No repeats were made: the limits are fixed floors."


def test_an_anchor_is_no_control_and_its_verdict_no_test_set():
    base, anchor = spec("base", dp_shard=2), spec("one_device")
    one = spec("fsdp2_tp2", dp_shard=2, tp=2)
    jobs = (
        job(anchor, Role.ANCHOR, 8),
        job(base, Role.CONTROL, 8),
        job(one, Role.TEST, 8),
    )
    names = ("one_device", "base", "fsdp2_tp2")
    view = build_view(
        title="t",
        verdicts=[
            Verdict("base", "one_device", Judgement.PASS),
            Verdict("fsdp2_tp2", "base", Judgement.PASS),
        ],
        evidences=[evidence(name, 8) for name in names],
        subject=Plan(Experiment("t", Path("t.toml"), (base,), (one,), anchor=anchor), jobs),
        calibrations={"base": learnt(1)},
    )
    assert [control.name for control in view.controls] == ["base"]
    assert view.anchor.name == "one_device"
    assert [row.name for row in rows(view)] == ["base (control)", "fsdp2_tp2"]
    assert view.headline == (
        "1 test set: agrees with the control, and the control with its anchor."
    )
    assert view.notes == ()  # the anchor's pair is judged by the control's calibration
    assert document(view)["control"]["name"] == "base"
    assert document(view)["anchor"]["degrees"] == "one rank"
    assert "The control itself, against its anchor one_device" in to_html(view)


def test_every_text_of_a_view_is_plain():
    view = hostile_view()
    (test,) = view.tests
    assert test.run.name == HOSTILE
    assert test.verdict.cause.isprintable()
    assert "\x00" not in test.run.error.traceback


def test_every_limit_stands_at_the_step_of_its_difference():
    for test in sample_view().tests:
        for name in SIGNAL_TITLES:
            found = test.comparison(name)
            assert len(found.limit) in (0, len(found.difference))
            if found.limit:
                np.testing.assert_array_equal(found.limit.steps, found.difference.steps)


def test_a_test_set_without_a_comparison_stands_alone():
    """What nobody compared while judging is compared by no report either."""
    runs = [evidence(name, 4, samples=tensor_samples(name)) for name in "ca"]
    view = build_view_of(title="t", verdicts=[Verdict("a", "c", Judgement.PASS)], evidences=runs)
    (test,) = view.tests
    assert test.run.signal("loss")
    assert not test.comparison("loss").difference
    assert (test.loss_only, test.tensors, test.gradients) == (None, None, None)


def test_a_run_without_evidence_still_has_a_row():
    view = build_view(title="t", verdicts=[Verdict("a", "c", Judgement.ERROR, "crashed")])
    (row,) = rows(view)
    assert (row.judgement, row.name, row.cause, row.loss_only) == (
        Judgement.ERROR,
        "a",
        "crashed",
        ABSENT,
    )


def test_nothing_judged_is_never_pass():
    assert ReportView("t").worst is Judgement.INCONCLUSIVE


def test_rows_are_what_the_terminal_prints():
    table = {row.name: row for row in rows(sample_view())}
    assert table["float8_async_tp"].techniques == "float8, compile, async tp"
    assert table["float8_async_tp"].onset == "step 2"
    assert table["float8_async_tp"].loss_only.startswith("would fail (5.")
    assert table["fsdp2_pp2_1f1b"].loss_only.startswith("would pass (")


def test_a_loss_that_is_not_finite_fails_the_loss_only_gate():
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.FAIL)],
        evidences=[
            Evidence("a", "a", (1, 2), {"loss": (1.0, math.nan)}),
            Evidence("c", "c", (1, 2), {"loss": (1.0, 1.0)}),
        ],
    )
    assert rows(view)[0].loss_only == "would fail (not finite)"


@pytest.mark.parametrize(("apart", "said"), [(1e-7, False), (2e-3, True)])
def test_repeats_that_allow_far_more_than_arithmetic_does_are_worth_a_sentence(apart, said):
    control, test = evidence("control", 8), evidence("t", 8)

    def off(name, factor):
        values = [value * factor for value in control.signals["loss"].values]
        both = dict.fromkeys(("loss", "loss_recomputed"), values)
        return replace(control, name=name, signals={**control.signals, **both})

    calibration = calibrate(control, [off("up", 1 + apart), off("down", 1 - apart)])
    assert calibration.problems == ()
    view = build_view(
        title="t",
        verdicts=[Verdict("t", "control", Judgement.PASS)],
        evidences=[control, test],
        calibrations={"control": calibration},
    )
    found = [note for note in view.notes if "differ so much that they allow the loss" in note]
    assert bool(found) is said
    assert all("times the floor of its arithmetic" in note for note in found)


def test_repeats_that_are_few_are_not_called_wrong():
    """They differ by ten times the floor; that limits are a thousand floors is for their number."""
    control = evidence("control", 8)
    repeats = [
        replace(
            control,
            name=f"r{each}",
            signals={
                signal: [value * (1 + 1e-5 * (-1) ** each) for value in column.values]
                for signal, column in control.signals.items()
            },
        )
        for each in range(3)
    ]
    view = build_view(
        title="t",
        verdicts=[Verdict("t", "control", Judgement.PASS)],
        evidences=[control, evidence("t", 8)],
        calibrations={"control": calibrate(control, repeats)},
    )
    (note,) = (note for note in view.notes if "times the floor of its arithmetic" in note)
    assert note.startswith("3 repeats of the control differ by 1e-5 in the ")
    assert note.endswith("with more repeats less passes.")


@pytest.mark.parametrize("experts", [False, True])
def test_a_wide_limit_may_be_the_rounding_of_experts(experts):
    names = tuple(f"layers.{at}.moe.experts.w1" for at in range(len(NAMES))) if experts else NAMES

    def run(name, noise=0.0, factor=1.0):
        run = evidence(name, 8, samples=tensor_samples(name, noise=noise, names=names))
        values = [value * factor for value in evidence("control", 8).signals["loss"].values]
        both = dict.fromkeys(("loss", "loss_recomputed"), values)
        return replace(run, signals={**run.signals, **both})

    control = run("control")
    repeats = [run("up", 3e-4, 1.002), run("down", 3e-4, 0.998)]
    view = build_view(
        title="t",
        verdicts=[Verdict("t", "control", Judgement.PASS)],
        evidences=[control, run("t")],
        calibrations={"control": calibrate(control, repeats)},
    )
    (note,) = (note for note in view.notes if "differ so much that they allow the loss" in note)
    assert ("do its experts round to bfloat16" in note) is experts
    assert ("is its training that unstable" in note) is not experts
    assert note.rstrip(".").endswith("or are its repeats wrong?")


def test_runs_that_others_are_judged_by_are_listed_in_every_report():
    control, low = spec("c", dp_shard=2), spec("c.float32", dp_shard=2)
    made = [
        job(control, Role.CONTROL, 8),
        job(low, Role.REFERENCE, 1),
        replace(job(control, Role.OTHER_SEED, 8), name="c.seed43", identity="43"),
        job(spec("a", dp_shard=2), Role.TEST, 8),
    ]
    error = RankError(0, "OutOfMemoryError: 80 GB")
    view = build_view(
        title="t",
        verdicts=[Verdict("a", "c", Judgement.PASS)],
        evidences=[evidence(name, 8) for name in ("c", "a", "c.seed43")],
        subject=Plan(Experiment("t", Path("t.toml"), (control,), ()), tuple(made)),
        records=[
            record(made[1], 4.0, status=RunStatus.CRASHED, error=error),
            record(made[2], 12.0, reused=True),
        ],
    )
    assert [(each.run.name, each.role) for each in view.besides] == [
        ("c.float32", "reference"),
        ("c.seed43", "other seed"),
    ]
    assert len({each.run.anchor for each in view.besides}) == 2
    assert [each["role"] for each in document(view)["besides"]] == ["reference", "other seed"]
    page = to_html(view)
    assert "Runs beside them" in page
    assert "reference: OutOfMemoryError: 80 GB" in page
    plain = to_markdown(view)
    assert "- other seed of c **c.seed43**: FSDP 2, 12.0 s (reused)" in plain
    assert "- reference **c.float32**: FSDP 2, 4.0 s: OutOfMemoryError: 80 GB" in plain
