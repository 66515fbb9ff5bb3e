"""Runs that ended because their equivalence was settled, and those that only look so."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_examples import SAMPLES, in_force, run, spec

from converge_harness.calibrations import CALIBRATION_FILE, StoredCalibration, read_calibrations
from converge_harness.judge.calibration import calibrate
from converge_harness.judge.compare.tost import ALPHA, level_of_look
from converge_harness.launch.options import Training
from converge_harness.matrix.calibrate import calibrate_control
from converge_harness.matrix.conclude import conclude
from converge_harness.matrix.judge import ended_with_sets, judge_pair, pairs_of
from converge_harness.matrix.load import load_plan
from converge_harness.matrix.run import Ran
from converge_harness.matrix.stop import _judged_until
from converge_harness.model import (
    Judgement,
    RankError,
    RepeatKind,
    Role,
    RunRecord,
    RunStatus,
    TrainConfig,
)
from converge_harness.store import Store
from converge_harness.trainers import assume_toolchain

ROOT = Path(__file__).parents[2]
STEPS = 800
EXPERIMENT = f"""
schema = 1
[trainer]
train_config = "{ROOT}/train_configs/llama3_debug.toml"
set = {{ "training.steps" = {STEPS} }}
[control]
name = "fsdp2"
parallelism = {{ dp_shard = 2 }}
[[test]]
name = "again"
parallelism = {{ dp_shard = 2 }}
stop = "settled"
[[test]]
name = "whole"
parallelism = {{ dp_shard = 2 }}
"""


# ------------------------------------------------------------------- levels


def test_the_levels_of_all_looks_add_up_and_early_ones_get_little():
    shares = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
    levels = [level_of_look(*pair[::-1]) for pair in pairwise(shares)]
    assert levels == pytest.approx([3.0e-8, 8.9e-5, 5.5e-3, 0.0444], rel=0.02)
    assert sum(levels) == pytest.approx(ALPHA)
    assert level_of_look(1.0, 0.0) == ALPHA  # to the last bit, as without looks


@given(st.lists(st.floats(0.01, 0.99), max_size=6))
def test_whatever_the_looks_they_spend_all_of_it_and_no_more(shares):
    planned = [0.0, *sorted(set(shares)), 1.0]
    levels = [level_of_look(*pair[::-1]) for pair in pairwise(planned)]
    assert all(level >= 0 for level in levels)
    assert sum(levels) == pytest.approx(ALPHA)


# ----------------------------------------------------------------- verdicts


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("settled") / "matrix.toml"
    path.write_text(EXPERIMENT)
    plan = load_plan(path, (), on_gpu=False, find=assume_toolchain)
    # What the examples' runs were, instead of what the file's would be.
    return {
        pair.test.name: pair._replace(
            test=replace(pair.test, spec=spec(pair.test.name)),
            control=replace(pair.control, spec=spec()),
        )
        for pair in pairs_of(plan)
    }


def long_run(name, steps=STEPS, *, drift=0.0, since=STEPS):
    """A run whose loss is off by ``drift`` after step ``since``."""
    every = range(1, steps + 1)
    wave = [5.0 + (step % 7) / 100 for step in every]
    losses = tuple(
        loss * (1 + (drift if step > since else 0.0))
        for step, loss in zip(every, wave, strict=True)
    )
    return run(
        name,
        steps=tuple(every),
        signals={
            "loss": losses,
            "loss_recomputed": losses,
            "grad_norm": tuple(1.0 + loss / 100 for loss in wave),
            "grad_norm_recomputed": tuple(1.0 + loss / 100 for loss in wave),
            "lr": (1e-3,) * steps,
            "tokens": (64.0,) * steps,
            "grads_missing": (0.0,) * steps,
        },
        batch_digests=tuple(f"{step:016x}" for step in every),
        batch_agrees=(True,) * steps,
        in_force=in_force(),
        expected_steps=STEPS,
        samples=tuple(each for each in SAMPLES if each.step <= steps),
    )


def stopped_after(evidence):
    """As it is read when converge ended it."""
    why = RankError(None, f"it was settled, after step {evidence.steps.size} of {STEPS}")
    return replace(evidence, status=RunStatus.STOPPED, complete=False, error=why)


def judged(pair, test, control=None):
    control = control or long_run("fsdp2")
    calibration = calibrate(control, [control])
    return judge_pair(pair, {test.name: test, control.name: control}, calibration)


def check_of(verdict, name):
    return next(check for check in verdict.checks if check.name == name)


def test_a_settled_run_passes_as_of_its_look(pairs):
    pair = pairs["again"]
    assert pair.looks == (100, 200, 400)
    verdict, compared = judged(pair, stopped_after(long_run("again", 203)))
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert compared.test.steps[-1] == compared.control.steps[-1] == 200
    assert check_of(verdict, "complete").detail == f"200 of {STEPS} steps: then it was settled"
    assert compared.level == level_of_look(1 / 4, 1 / 8)


def test_a_whole_run_is_judged_at_what_its_looks_left(pairs):
    verdict, compared = judged(pairs["again"], long_run("again"))
    assert verdict.judgement is Judgement.PASS
    assert compared.level == level_of_look(1.0, 1 / 2) < ALPHA
    verdict, compared = judged(pairs["whole"], long_run("whole"))
    assert verdict.judgement is Judgement.PASS
    assert compared.level == ALPHA


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("again", long_run("again", 99)),  # before its first look
        ("again", long_run("again", 203, drift=0.005, since=150)),  # not equivalent
        ("whole", long_run("whole", 203)),  # nobody said that it may be settled
    ],
    ids=["early", "different", "unasked"],
)
def test_another_run_that_was_stopped_does_not_pass(pairs, name, test):
    verdict, _ = judged(pairs[name], stopped_after(test))
    assert verdict.judgement is not Judgement.PASS


def with_value(evidence, signal, step, value):
    column = list(evidence.signals[signal])
    column[step - 1] = value
    return replace(evidence, signals={**evidence.signals, signal: tuple(column)})


@pytest.mark.parametrize(
    "broken",
    [
        with_value(long_run("again", 230), "loss", 220, float("nan")),
        with_value(long_run("again", 230), "lr", 220, 2e-3),
        with_value(long_run("again", 230), "tokens", 220, 65.0),
        replace(
            long_run("again", 230),
            batch_digests=tuple(f"{step % 220:016x}" for step in range(1, 231)),
        ),
        replace(long_run("again", 230), steps=(*range(1, 230), 229)),
    ],
    ids=["nan", "learning rate", "tokens", "samples", "order"],
)
def test_what_breaks_after_the_look_is_no_pass(pairs, broken):
    verdict, _ = judged(pairs["again"], stopped_after(broken))
    assert verdict.judgement is not Judgement.PASS
    clean, _ = judged(pairs["again"], stopped_after(long_run("again", 230)))
    assert clean.judgement is Judgement.PASS


@pytest.mark.parametrize(
    "control",
    [
        with_value(long_run("fsdp2"), "loss", 700, float("nan")),
        replace(long_run("fsdp2", 500), complete=False),
        replace(long_run("fsdp2", 500), status=RunStatus.CRASHED, complete=False),
    ],
    ids=["nan", "short", "crashed"],
)
def test_a_control_that_breaks_after_the_look_gives_no_pass(pairs, control):
    verdict, _ = judged(pairs["again"], stopped_after(long_run("again", 203)), control)
    assert verdict.judgement is not Judgement.PASS


def test_an_open_set_that_was_stopped_is_told_how_to_train_on(pairs):
    """It was settled by the repeats of then, say, and is not by those of now."""
    open_set = stopped_after(long_run("again", 203, drift=0.0011, since=150))
    verdict, _ = judged(pairs["again"], open_set)
    assert verdict.judgement is not Judgement.PASS
    assert "logs" not in verdict.next_command


def test_a_crash_after_a_look_is_no_pass(pairs):
    crashed = replace(stopped_after(long_run("again", 203)), status=RunStatus.CRASHED)
    assert judged(pairs["again"], crashed).verdict.judgement is Judgement.ERROR


# ------------------------------------- a control and repeats that ended with the sets they are for


WITHOUT_WARM_UP = TrainConfig("x.toml", {"lr_scheduler": {"warmup_steps": 0}})


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("ended") / "matrix.toml"
    settled = EXPERIMENT.replace('name = "whole"', 'name = "other"\nstop = "settled"')
    path.write_text(settled.replace("schema = 1", 'schema = 1\nrepeats = ["ulp", "ulp.2"]'))
    plan = load_plan(path, (), on_gpu=False, find=assume_toolchain)
    # What the examples' runs were, instead of what the file's would be.
    like = {
        job.name: replace(
            job,
            spec=replace(spec(job.spec.name), train_config=WITHOUT_WARM_UP),
            identity=job.name,
        )
        for job in plan.jobs
    }
    tests = {
        name: replace(job, spec=replace(job.spec, control="fsdp2", stop=plan.job(name).spec.stop))
        for name, job in like.items()
        if job.role is Role.TEST
    }
    return replace(plan, jobs=tuple((like | tests)[job.name] for job in plan.jobs))


def repeat_run(name, steps=STEPS):
    """A control's repeat, whose rounding differs a little."""
    control = long_run(name, steps)
    nudge = 1e-7 if name.endswith("2") else -1e-7
    moved = {
        signal: tuple(value * (1 + nudge) for value in control.signals[signal])
        for signal in ("loss", "loss_recomputed", "grad_norm", "grad_norm_recomputed")
    }
    return replace(
        control, signals={**control.signals, **moved}, repeat=RepeatKind.ULP, complete=True
    )


def evidence_of_all(plan, **steps):
    """Evidence of runs that were stopped after these steps; those of no step finished."""
    repeats = [job.name for job in plan.jobs if job.role is Role.REPEAT]
    assert len(repeats) == 2
    found = {}
    for name in ("fsdp2", *repeats, "again", "other"):
        key = name.replace(".", "_")
        made = repeat_run if name in repeats else long_run
        found[name] = stopped_after(made(name, steps[key])) if key in steps else made(name)
    return found


ENDED = {"fsdp2": 203, "fsdp2_ulp": 200, "fsdp2_ulp_2": 210, "again": 200, "other": 200}


def verdicts(plan, evidences):
    """As a matrix is judged."""
    found = ended_with_sets(plan, evidences)
    calibration = calibrate_control(plan, plan.job("fsdp2"), found)
    return {pair.test.name: judge_pair(pair, found, calibration).verdict for pair in pairs_of(plan)}


def test_sets_pass_that_were_settled_with_their_control_and_its_repeats(plan):
    found = ended_with_sets(plan, evidence_of_all(plan, **ENDED))
    for name in ("fsdp2", "fsdp2.ulp", "fsdp2.ulp.2"):
        assert found[name].steps[-1] == 200
        assert found[name].status is RunStatus.FINISHED
        assert found[name].settled_of == STEPS
    judged = verdicts(plan, evidence_of_all(plan, **ENDED))
    whole = {name: ENDED[name] for name in ("again", "other")}
    for each in (judged, verdicts(plan, evidence_of_all(plan, **whole))):
        assert {v.judgement for v in each.values()} == {Judgement.PASS}, each
    # A quicker control that finished is used as far as its repeats are.
    quick = evidence_of_all(plan, **{name: at for name, at in ENDED.items() if name != "fsdp2"})
    assert {v.judgement for v in verdicts(plan, quick).values()} == {Judgement.PASS}


def test_runs_that_finished_are_left_as_they_are(plan):
    evidences = evidence_of_all(plan, again=200, other=200)
    assert ended_with_sets(plan, evidences) == evidences


@pytest.mark.parametrize(
    "changed",
    [
        {"again": None},  # a set trained to its end
        {"again": 400},  # … or further than they did
        {"fsdp2_ulp": 150},  # a repeat ended before the look
        {"fsdp2": 199},
    ],
    ids=["whole", "further", "repeat", "control"],
)
def test_nothing_passes_by_a_control_or_repeat_that_ended_too_early(plan, changed):
    steps = {name: at for name, at in (ENDED | changed).items() if at is not None}
    evidences = evidence_of_all(plan, **steps)
    assert ended_with_sets(plan, evidences) == evidences
    for verdict in verdicts(plan, evidences).values():
        assert verdict.judgement is Judgement.INVALID
        assert "was stopped after step" in verdict.cause


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2.ulp"])
def test_one_that_broke_gives_no_pass_although_the_others_ended_with_the_sets(plan, name):
    evidences = evidence_of_all(plan, **ENDED)
    crashed = replace(evidences[name], status=RunStatus.CRASHED)
    nan = with_value(evidences[name], "loss", 180, float("nan"))
    backwards = replace(evidences[name], steps=(*range(1, evidences[name].steps.size), 7))
    for broken in (crashed, nan, backwards):
        judged = verdicts(plan, evidences | {name: broken})
        # ERROR: the set itself was stopped, and nothing settles it.
        undecided = {Judgement.INVALID, Judgement.ERROR}
        assert {each.judgement for each in judged.values()} <= undecided


def test_a_repeat_that_is_off_opens_nothing(plan):
    """Of three repeats the limits are learnt; a wrong one would let a wrong set pass."""
    evidences = evidence_of_all(plan, **ENDED)
    off = with_value(evidences["fsdp2.ulp"], "loss", 180, 6.0)
    judged = verdicts(plan, evidences | {"fsdp2.ulp": off})
    assert all(each.judgement is not Judgement.PASS for each in judged.values())


@settings(max_examples=50)  # the machine may be busy training
@given(st.fixed_dictionaries({}, optional={name: st.integers(1, STEPS - 1) for name in ENDED}))
def test_whatever_was_stopped_where_a_pass_needs_all_up_to_the_look(plan, steps):
    judged = verdicts(plan, evidence_of_all(plan, **steps))
    needed = [steps.get(name, STEPS) for name in ("fsdp2", "fsdp2_ulp", "fsdp2_ulp_2")]
    for name, verdict in judged.items():
        if verdict.judgement is Judgement.PASS:
            assert steps.get(name, STEPS) >= 100  # the first look
            assert min(needed) >= steps.get(name, STEPS)


def test_what_was_stopped_is_read_as_far_as_all_of_it_came():
    """Whoever judges a stopped set again must see what the final verdict is judged by."""
    stopped = [Training(Path("a"), 400, stopped=True), Training(Path("b"), 380, stopped=True)]
    assert _judged_until(100, stopped) == 380
    assert _judged_until(100, [*stopped, Training(Path("c"), 130)]) == 100
    assert _judged_until(100, []) == 100


def test_limits_that_were_given_judge_by_a_control_that_ended_with_its_sets(plan, tmp_path):
    """They are of all steps, and stay those that the user gave."""
    whole = evidence_of_all(plan)
    control = plan.job("fsdp2")
    learnt = replace(
        calibrate_control(plan, control, whole), control="fsdp2", identity=control.identity
    )
    given = {"fsdp2": StoredCalibration(learnt, {}, {}, "2026-02-03")}
    jobs = tuple(job for job in plan.jobs if job.role in (Role.CONTROL, Role.TEST))
    experiment = replace(plan.experiment, calibration=tmp_path / "given.json")
    calibrated = replace(plan, experiment=experiment, jobs=jobs)
    ended = evidence_of_all(plan, **ENDED)

    def concluded(evidences):
        records = tuple(
            RunRecord(job.name, job.identity, tmp_path, evidences[job.name].status, 1.0, ())
            for job in jobs
        )
        kept = {job.identity: evidences[job.name] for job in jobs}
        reports, store = tmp_path / "reports", Store(tmp_path / "store")
        judged = conclude(
            calibrated,
            Ran(records, {}, kept),
            reports,
            store=store,
            given=given,
            save=False,
        )
        (written,) = read_calibrations(reports / CALIBRATION_FILE)
        assert written.calibration.signals["loss"].steps[-1] == STEPS
        assert not store.root.exists()  # it is the user's file that is used again
        return {verdict.name: verdict.judgement for verdict in judged.verdicts}

    assert set(concluded(ended).values()) == {Judgement.PASS}
    # A set that trained on is not judged by a control that did not.
    further = evidence_of_all(plan, **ENDED | {"again": 400})
    assert concluded(further)["again"] is Judgement.INVALID
    wrong = ended | {"again": with_value(ended["again"], "loss", 150, 9.0)}
    assert concluded(wrong)["again"] is Judgement.FAIL
