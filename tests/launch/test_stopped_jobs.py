"""Test sets that are stopped once somebody says that their FAIL is certain."""

from dataclasses import replace

import pytest
from launch_jobs import plan_of, tiny_job

from converge_harness import launch
from converge_harness.launch import RunOptions, run_plan
from converge_harness.launch.stopping import first_look, is_due, next_look, still_certain
from converge_harness.model import Ask, Role, RunStatus

pytestmark = pytest.mark.timeout(300)

LOOKS = RunOptions(fail_look=lambda job, folder, records: "")


def look_of(job, *, options=LOOKS, **limits):
    return first_look(job, plan_of(job, **limits).experiment, options)


def test_a_test_set_is_looked_at_after_16_steps_unless_told_otherwise():
    job = tiny_job("long", steps=100)
    assert look_of(job) == 16
    assert look_of(job, stop_after=3) == 3


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
    assert look_of(job) is None


def test_who_wants_all_steps_gets_them():
    job = tiny_job("long", steps=100)
    unstopped = replace(job, spec=replace(job.spec, stop=False))
    no_worse = replace(job, spec=replace(job.spec, ask=Ask.NO_WORSE))
    assert look_of(unstopped) is look_of(no_worse) is None
    assert look_of(job, stop_after=None) is look_of(job, options=RunOptions()) is None
    assert look_of(job, other_seeds=(2, 3)) is None


def test_a_look_is_due_at_twice_the_steps_of_the_last_one_and_not_at_the_end():
    job = tiny_job("long", steps=100)
    assert not is_due(15, job, 16)
    assert is_due(17, job, 16)
    assert not is_due(20, job, next_look(17))
    assert is_due(34, job, next_look(17))
    assert not is_due(100, job, 16)
    assert not is_due(50, job, None)


class EnoughError(Exception):
    """Ends a plan from its observer."""


class Judge:
    """Says of one set that its FAIL is certain, once a run that it needs has finished."""

    def __init__(self, wrong, needed):
        self.wrong, self.needed, self.asked = wrong, needed, []

    def __call__(self, job, folder, records):
        assert (folder / "job.json").is_file()
        if self.needed.identity not in records:
            return None
        self.asked.append(job.name)
        return "loss-first-step" if job.name == self.wrong else ""


def test_only_the_set_that_is_certain_to_fail_ends_early_and_is_not_run_again(
    warm_tiny, store, cold
):
    control = warm_tiny("control", role=Role.CONTROL, ranks=1, steps=2)
    wrong = warm_tiny("wrong", ranks=1, steps=1000, seconds=0.05)
    right = warm_tiny("right", ranks=1, steps=8, seconds=0.05)
    plan = plan_of(wrong, right, control, stop_after=3)
    judge = Judge("wrong", control)
    options = replace(cold, fail_look=judge)
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
        f"its FAIL was certain (loss-first-step), after step {steps[-1]} of 1000"
    )
    started = [event.job.name for event in events if isinstance(event, launch.Started)]
    assert started[0] == "control"  # it is judged by that

    again = run_plan(plan, store, options, events.append)
    assert [record.reused for record in again] == [True] * 3
    assert again[0].status is RunStatus.STOPPED

    longer = replace(plan, experiment=replace(plan.experiment, stop_after=400))
    assert first_look(wrong, longer.experiment, options) == 400
    assert not still_certain(
        wrong,
        store.record(wrong.identity),
        longer.experiment,
        options,
        {control.identity: records[2]},
    )

    asked_for_all = replace(plan, experiment=replace(plan.experiment, stop_after=None))
    short = replace(asked_for_all, jobs=(control, right))
    assert all(record.reused for record in run_plan(short, store, options, events.append))
    mended = replace(options, fail_look=Judge("nothing", control))
    limited = plan_of(replace(wrong, steps=1000), control, stop_after=3, progress_timeout_s=60.0)
    begun = []

    def end_it(event):
        if isinstance(event, launch.Started):
            begun.append(event.job.name)
            raise EnoughError

    with pytest.raises(EnoughError):
        run_plan(limited, store, mended, end_it)
    assert begun == ["wrong"]  # no longer certain: it trains anew
