"""Runs that a scheduler interrupted and requeued: as good as uninterrupted ones, or not passed."""

from dataclasses import replace

import pytest
from judge_examples import FSDP2, STEPS, judge, run, spec
from resume_examples import (
    STATES,
    a_pass,
    nulled,
    ran,
    resumed,
    state,
    with_digests,
    with_loaded,
    with_pass,
    with_signal,
)

from converge_harness.judge import calibrate
from converge_harness.model import (
    CauseClass,
    Evidence,
    Judgement,
    Outcome,
    Parallelism,
    RankError,
    Recovery,
    RestartOwner,
    RunStatus,
    SetSpec,
    Struck,
    Tier,
)

CLUSTER = RestartOwner.CLUSTER
CONTROL = run("control")
SPEC = spec("requeued", FSDP2, recovery=Recovery((), checkpoint_every=4, restarts=CLUSTER))
PASSES = (
    a_pass(1, 0, 10, saves=[4, 8]),
    a_pass(2, 8, 13, saves=[12]),
    a_pass(3, 12, STEPS, saves=[16], ended=True),
)
REQUEUED = resumed(*PASSES, restarts=CLUSTER)
"""Interrupted after steps 10 and 13: steps 9, 10 and 13 are replayed."""
IN_ONE = resumed(a_pass(1, 0, STEPS, saves=[4, 8, 12, 16], ended=True), restarts=CLUSTER)
MOMENTS = nulled(state(8).state_norm, (slice(None), 0))


def judged(test: Evidence, test_spec: SetSpec = SPEC):
    return judge(test, CONTROL, spec=test_spec, control_spec=spec())


def against(control: Evidence):
    named = replace(control, name="control")
    return judge(run("test"), named, spec=spec("test"), control_spec=SPEC)


def answers(verdict):
    return {check.name: check for check in verdict.checks if check.tier is Tier.RESUME}


@pytest.mark.parametrize(
    ("step", "passes", "replayed"),
    [
        (6, [(1, 6)], ()),
        (9, [(1, 9), (9, 9)], (9,)),
        (13, [(1, 10), (9, 13), (13, 13)], (9, 10, 13)),
        (16, [(1, 10), (9, 13), (13, 16)], (9, 10, 13)),
    ],
)
def test_as_of_an_earlier_step_it_has_the_passes_that_had_begun(step, passes, replayed):
    early = REQUEUED.up_to(step)
    assert [(int(each.steps[0]), int(each.steps[-1])) for each in early.passes] == passes
    assert early.passes[-1].ended
    assert (early.replayed, early.steps[-1]) == (replayed, step)
    assert early.interrupted is (len(passes) > 1)
    verdict = judge(early, CONTROL.up_to(step), spec=SPEC, control_spec=spec())
    assert verdict.judgement is Judgement.PASS, verdict.cause


def test_an_elastic_run_is_judged_as_a_whole():
    with pytest.raises(ValueError, match="is judged by its resumes"):
        replace(REQUEUED, restarts=None).up_to(9)


def test_a_requeued_run_whose_resumes_kept_all_passes():
    verdict = judged(REQUEUED)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    found = answers(verdict)
    assert {name: check.outcome for name, check in found.items()} == {
        "passes-continuous": Outcome.PASS,
        "state-restored": Outcome.PASS,
        "data-resumed": Outcome.PASS,
        "replays-agree": Outcome.PASS,
        "segments-as-scheduled": Outcome.SKIPPED,
        "faults-struck": Outcome.SKIPPED,
        "recovers-in-time": Outcome.SKIPPED,
        "torn-never-loaded": Outcome.SKIPPED,
    }
    assert "interrupted and continued" in found["passes-continuous"].detail
    assert found["faults-struck"].detail.endswith("after step 10, 13")
    assert found["replays-agree"].detail.startswith("3 steps replayed")


def test_a_run_that_could_have_been_requeued_and_was_not_is_not_harmed():
    """Not even where its checkpoints were not written: nothing came back from them."""
    for test in (IN_ONE, with_pass(IN_ONE, 1, saved=(), whole=())):
        verdict = judged(test)
        assert verdict.judgement is Judgement.PASS, verdict.cause
        outcomes = {name: check.outcome for name, check in answers(verdict).items()}
        assert outcomes.pop("passes-continuous") is Outcome.PASS
        assert set(outcomes.values()) == {Outcome.SKIPPED}


def test_a_run_that_starts_over_because_no_checkpoint_was_whole_passes():
    over = resumed(a_pass(1, 0, 3), a_pass(2, 0, STEPS, saves=[4], ended=True), restarts=CLUSTER)
    over = with_pass(over, 2, saved=IN_ONE.passes[0].saved, whole=IN_ONE.passes[0].whole)
    verdict = judged(over)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    assert answers(verdict)["state-restored"].outcome is Outcome.SKIPPED
    assert answers(verdict)["replays-agree"].outcome is Outcome.PASS


LOST = {
    "moments": (
        with_loaded(REQUEUED, 2, state_norm=MOMENTS),
        "state-restored",
        f"pass 2 (interrupted and continued), which loads step 8, {STATES[0]}",
    ),
    "lr": (with_loaded(REQUEUED, 3, lr=5e-4), "state-restored", "lr is 0.0005"),
    "older": (
        resumed(PASSES[0], a_pass(2, 4, STEPS, saves=[8, 12, 16], ended=True), restarts=CLUSTER),
        "passes-continuous",
        "pass 2 starts from step 4 although step 8 was saved",
    ),
    "unsaved": (
        with_pass(REQUEUED, 3, saved=(), whole=()),
        "passes-continuous",
        "pass 3 has left no checkpoint of step 16",
    ),
    "counter": (
        with_loaded(REQUEUED, 2, samples_consumed=0),
        "passes-continuous",
        "samples consumed: 0 in pass 2 (interrupted and continued)",
    ),
    "replay": (
        with_signal(REQUEUED, 2, "loss", lambda step, x: x * (1.001 if step == 9 else 1)),
        "replays-agree",
        "loss of step 9",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_requeued_run_that_lost_something_fails(name):
    test, check, words = LOST[name]
    verdict = judged(test)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class in (CauseClass.STATE, CauseClass.REPLAY)
    assert answers(verdict)[check].outcome is Outcome.FAIL
    assert words in answers(verdict)[check].detail


def test_other_samples_after_a_requeue_fail():
    test = with_digests(REQUEUED, 2, CONTROL.batch_digests[:5])
    verdict = judged(test)
    assert verdict.judgement is Judgement.FAIL
    assert verdict.cause_class is CauseClass.DATA
    assert "started over from the beginning" in verdict.cause


UNTOLD = {
    "loaded": with_pass(REQUEUED, 2, loaded=None),
    "saved": with_pass(REQUEUED, 1, saved=()),
    "what ran": with_pass(REQUEUED, 2, in_force=None),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_a_resume_of_which_evidence_is_missing_is_no_pass(name):
    assert judged(UNTOLD[name]).judgement is Judgement.INVALID
    assert against(UNTOLD[name]).judgement is Judgement.INVALID


def test_faults_of_a_script_are_no_part_of_a_requeued_run():
    test = replace(REQUEUED, struck=(Struck(0, "kill", 10, 1990.0, number=1),))
    verdict = judged(test)
    assert verdict.judgement is Judgement.INVALID
    assert answers(verdict)["faults-struck"].outcome is Outcome.INVALID


def test_a_run_without_passes_is_not_taken_for_one_that_was_never_interrupted():
    verdict = judged(replace(REQUEUED, passes=()))
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause.startswith("the run left no passes")


@pytest.mark.parametrize("control", [REQUEUED, IN_ONE], ids=["requeued", "in one"])
def test_a_control_that_lost_nothing_is_as_good_as_an_uninterrupted_one(control):
    verdict = against(control)
    assert verdict.judgement is Judgement.PASS, verdict.cause
    sound = next(check for check in verdict.checks if check.name == "control-sound")
    assert ("in 3 passes, interrupted and continued" in sound.detail) is control.interrupted


@pytest.mark.parametrize("name", LOST)
def test_nothing_is_judged_against_a_control_that_lost_something(name):
    control, _, words = LOST[name]
    verdict = against(control)
    assert verdict.judgement is Judgement.INVALID
    assert verdict.cause.startswith("the control was interrupted and continued, and ")
    assert words in verdict.cause


def test_a_control_that_went_on_with_other_degrees_is_none():
    other = ran(Parallelism(dp_replicate=2))
    verdict = against(with_pass(REQUEUED, 2, in_force=other))
    assert verdict.judgement is Judgement.INVALID
    assert "pass 2" in verdict.cause


def test_a_test_set_that_trained_on_other_samples_than_a_requeued_control_is_no_pass():
    control = with_digests(REQUEUED, 3, CONTROL.batch_digests[: STEPS - 12])
    assert against(control).judgement is Judgement.INVALID


def test_a_requeued_repeat_teaches_only_when_it_is_sound():
    control = replace(IN_ONE, name="control")
    repeat = replace(REQUEUED, name="control/rerun.1", repeat="rerun")
    learnt = calibrate(control, [repeat])
    assert (learnt.problems, learnt.repeats) == ((), ("control/rerun.1",))
    for broken, _, words in LOST.values():
        if words.startswith("pass 3 has left no checkpoint"):
            continue  # nothing says which a repeat should have written
        (problem,) = calibrate(control, [replace(broken, repeat="rerun")]).problems
        assert problem.startswith("the repeat resumed was interrupted and continued, and ")
        assert words in problem


def test_a_repeat_that_was_resumed_on_purpose_teaches_nothing():
    repeat = replace(REQUEUED, restarts=RestartOwner.HARNESS, repeat="rerun")
    assert "was itself resumed" in calibrate(replace(IN_ONE, name="c"), [repeat]).problems[0]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RunStatus.TIMED_OUT, "ran into the time limit of its job: TIMEOUT after 60 s"),
        (RunStatus.CANCELLED, "was cancelled: TIMEOUT after 60 s"),
        (RunStatus.REFUSED, "was refused by the scheduler: TIMEOUT after 60 s"),
    ],
)
def test_what_a_scheduler_says_is_not_put_into_a_ranks_mouth(status, words):
    test = replace(
        REQUEUED,
        status=status,
        error=RankError(None, "TIMEOUT after 60 s"),
        says_why="slurm.log",
    )
    verdict = judged(test)
    assert verdict.judgement is Judgement.ERROR
    assert verdict.cause == f"the run {words}"
    assert verdict.next_command.startswith("cat ")
    assert verdict.next_command.endswith("slurm.log")
