"""Test sets that are stopped once somebody says that their verdict is known."""

from dataclasses import replace

import pytest
from launch_jobs import plan_of, tiny_job

from converge_harness import launch
from converge_harness.launch import RunOptions, run_plan
from converge_harness.launch.options import LookError, Training
from converge_harness.launch.stopping import Looks, looks, settling_looks, would_stop_again
from converge_harness.model import Ask, Role, RunRecord, RunStatus, Stop

pytestmark = pytest.mark.timeout(300)


def looks_of(job, **limits):
    return looks(job, plan_of(job, **limits).experiment)


def stopping(job, stop):
    return replace(job, spec=replace(job.spec, stop=stop))


def test_a_test_set_is_looked_at_after_16_steps_and_then_after_twice_as_many():
    job = tiny_job("long", steps=100)
    assert looks_of(job) == (16, 32)
    assert looks_of(job, stop_after=3) == (3, 6, 12, 24, 48)
    assert looks_of(tiny_job("shortest", steps=32)) == (16,)


def test_whether_it_is_settled_is_looked_at_after_planned_shares_of_the_run():
    job = stopping(tiny_job("long", steps=3000), Stop.SETTLED)
    warm = {"lr_scheduler.warmup_steps": 600}
    experiment = plan_of(job).experiment
    assert settling_looks(job, experiment) == (375, 750, 1500)
    assert looks(job, experiment) == (16, 32, 64, 128, 256, 375, 512, 750, 1024, 1500)
    late = replace(experiment, stop_after=400)
    assert looks(job, late) == (400, 750, 800, 1500)
    # Of fewer than 64 steps nobody asks whether they are equivalent.
    assert looks_of(stopping(tiny_job("a", steps=200), Stop.SETTLED)) == (16, 32, 64, 100)
    assert settling_looks(tiny_job("fails", steps=3000), experiment) == ()
    # The second half of what was trained has to lie past the warm-up.
    warming = replace(job, spec=replace(job.spec, overrides=warm))
    assert settling_looks(warming, experiment) == (1200, 1500)


@pytest.mark.parametrize(
    "job",
    [
        tiny_job("short", steps=31),
        tiny_job("control", steps=100, role=Role.CONTROL),
        tiny_job("repeat", steps=100, role=Role.REPEAT),
    ],
    ids=lambda job: job.name,
)
def test_short_sets_and_what_others_are_judged_by_are_never_stopped(job):
    assert looks_of(job) == ()
    assert looks_of(stopping(job, Stop.SETTLED)) == ()


def test_who_wants_all_steps_gets_them():
    job = tiny_job("long", steps=100)
    no_worse = replace(job, spec=replace(job.spec, ask=Ask.NO_WORSE))
    assert looks_of(stopping(job, Stop.NEVER)) == looks_of(no_worse) == ()
    assert looks_of(job, stop_after=None) == looks_of(job, other_seeds=(2, 3)) == ()


def asked_at(job, answers, steps, tmp_path, told=None):
    """The steps, of those that ended, after which the judge was asked."""
    asked, answers = [], iter(answers)

    def look(job, records, training):
        asked.append(training[job.identity].step)
        answer = next(answers)
        if isinstance(answer, LookError):
            raise answer
        return answer

    tell = ([] if told is None else told).append
    looking = Looks(plan_of(job).experiment, RunOptions(look=look), tell)
    for step in steps:
        if looking.is_due(job, step):
            looking.why_to_stop(job, {}, {job.identity: Training(tmp_path, step)})
    return asked


def test_a_look_is_due_once_and_not_at_the_end(tmp_path):
    job = tiny_job("long", steps=100)
    assert asked_at(job, ("", ""), (15, 17, 18, 31, 34, 64, 99, 100), tmp_path) == [17, 34]
    assert asked_at(job, ("",), (40, 60), tmp_path) == [40]  # two looks at once
    assert asked_at(job, (), (100,), tmp_path) == []


def test_a_look_that_comes_too_early_is_asked_again(tmp_path):
    job = tiny_job("long", steps=100)
    assert asked_at(job, (None, None, ""), (16, 17, 18, 19), tmp_path) == [16, 17, 18]


def test_a_look_that_fails_is_tried_once_more_after_another_step_and_then_said(tmp_path):
    job, broken = tiny_job("long", steps=100), LookError("job.json is cut off")
    told = []
    assert asked_at(job, (broken, ""), (16, 16, 17, 18), tmp_path, told) == [16, 17]
    assert told == []
    answers = (broken, broken, broken, "")
    assert asked_at(job, answers, (16, 17, 18, 32, 33), tmp_path, told) == [16, 17, 32, 33]
    (said,) = told
    assert said.message == (
        "long: could not be judged after step 17, and trains on: job.json is cut off"
    )


def test_an_earlier_run_that_cannot_be_judged_is_run_again(tmp_path):
    job = tiny_job("long", steps=100)

    def look(*_):
        raise LookError("job.json is cut off")

    line = '{"kind": "step", "step": 16, "loss": 1.0}'
    (tmp_path / "metrics.jsonl.part").write_text(f"{line}\n")
    record = RunRecord("long", job.identity, tmp_path, RunStatus.STOPPED, 1.0, ())
    again = would_stop_again(job, record, plan_of(job).experiment, RunOptions(look=look), {})
    assert again is False


class EnoughError(Exception):
    """Ends a plan from its observer."""


class Judge:
    """Says of one set that its FAIL is certain, once a run that it needs has come far enough."""

    def __init__(self, wrong, needed):
        self.wrong, self.needed, self.asked = wrong, needed, []

    def __call__(self, job, records, training):
        assert (training[job.identity].folder / "job.json").is_file()
        needed = training.get(self.needed.identity)
        if self.needed.identity not in records and (needed is None or needed.step < 3):
            return None
        self.asked.append(job.name)
        return "its FAIL was certain (loss-first-step)" if job.name == self.wrong else ""


def test_only_the_set_that_is_certain_to_fail_ends_early_and_is_not_run_again(
    warm_tiny, store, cold
):
    control = warm_tiny("control", role=Role.CONTROL, ranks=1, steps=2)
    wrong = warm_tiny("wrong", ranks=1, steps=1000, seconds=0.05)
    right = warm_tiny("right", ranks=1, steps=8, seconds=0.05)
    plan = plan_of(wrong, right, control, stop_after=3)
    judge = Judge("wrong", control)
    options = replace(cold, look=judge)
    events = []
    records = run_plan(plan, store, options, events.append)
    assert [record.status for record in records] == [
        RunStatus.STOPPED,
        RunStatus.FINISHED,
        RunStatus.FINISHED,
    ]
    stopped = records[0]
    steps = [each.step for each in events if isinstance(each, launch.Step) and each.job == wrong]
    assert 3 <= len(steps) < 1000
    assert stopped.error.message == (
        f"its FAIL was certain (loss-first-step); it ended after step {steps[-1]} of 1000"
    )
    started = [event.job.name for event in events if isinstance(event, launch.Started)]
    assert started[0] == "control"  # it is judged by that

    again = run_plan(plan, store, options, events.append)
    assert [record.reused for record in again] == [True] * 3
    assert again[0].status is RunStatus.STOPPED

    longer = replace(plan, experiment=replace(plan.experiment, stop_after=400))
    assert looks(wrong, longer.experiment) == (400,)
    assert not would_stop_again(
        wrong,
        store.record(wrong.identity),
        longer.experiment,
        options,
        {control.identity: records[2]},
    )

    asked_for_all = replace(plan, experiment=replace(plan.experiment, stop_after=None))
    short = replace(asked_for_all, jobs=(control, right))
    assert all(record.reused for record in run_plan(short, store, options, events.append))
    mended = replace(options, look=Judge("nothing", control))
    limited = plan_of(replace(wrong, steps=1000), control, stop_after=3, progress_timeout_s=60.0)
    begun = []

    def end_it(event):
        if isinstance(event, launch.Started):
            begun.append(event.job.name)
            raise EnoughError

    with pytest.raises(EnoughError):
        run_plan(limited, store, mended, end_it)
    assert begun == ["wrong"]  # no longer certain: it trains anew


def test_a_set_is_stopped_while_what_it_is_judged_by_still_trains(warm_tiny, store, cold):
    control = warm_tiny("control", role=Role.CONTROL, ranks=1, steps=40, seconds=0.1)
    wrong = warm_tiny("wrong", ranks=1, steps=1000, seconds=0.05)
    plan = plan_of(control, wrong, stop_after=3)
    ended = []

    def note(event):
        if isinstance(event, launch.Ended):
            ended.append((event.job.name, event.record.status))

    run_plan(plan, store, replace(cold, look=Judge("wrong", control)), note)
    assert ended == [("wrong", RunStatus.STOPPED), ("control", RunStatus.FINISHED)]
