"""Test sets that are stopped once somebody says that their verdict is known, and what they need."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch_jobs import plan_of, tiny_job

from converge_harness import launch
from converge_harness.launch import RunOptions, run_plan
from converge_harness.launch.continuing import saves_where_it_waits
from converge_harness.launch.local.run import Run, RunningCall
from converge_harness.launch.options import LookError, Training
from converge_harness.launch.progress import MetricsTail
from converge_harness.launch.stopping import (
    Looks,
    looks,
    read_by,
    settling_looks,
    stopped_again,
    used_again,
    wait_steps,
    why_to_end,
)
from converge_harness.model import (
    Ask,
    Repeat,
    RepeatKind,
    Role,
    RunRecord,
    RunStatus,
    Stop,
)
from converge_harness.run_folder.metrics import StepLine
from converge_harness.trainers import Call, Rendezvous
from converge_harness.trainers.megatron.trainer import MEGATRON

pytestmark = pytest.mark.timeout(300)


def looks_of(job, **limits):
    return looks(job, plan_of(job, **limits).experiment)


WARM_UP = "lr_scheduler.warmup_steps"


def stopping(job, stop, *, warm_up=0):
    overrides = {**job.spec.overrides, WARM_UP: warm_up}
    return replace(job, spec=replace(job.spec, stop=stop, overrides=overrides))


def test_a_test_set_is_looked_at_after_16_steps_and_then_after_twice_as_many():
    job = tiny_job("long", steps=100)
    assert looks_of(job) == (16, 32)
    assert looks_of(job, stop_after=3) == (3, 6, 12, 24, 48)
    assert looks_of(tiny_job("shortest", steps=32)) == (16,)


def test_whether_it_is_settled_is_looked_at_after_planned_shares_of_the_run():
    job = stopping(tiny_job("long", steps=3000), Stop.SETTLED)
    experiment = plan_of(job).experiment
    assert settling_looks(job, experiment) == (375, 750, 1500)
    assert looks(job, experiment) == (16, 32, 64, 128, 256, 375, 512, 750, 1024, 1500)
    late = replace(experiment, stop_after=400)
    assert looks(job, late) == (400, 750, 800, 1500)
    # Of fewer than 64 steps nobody asks whether they are equivalent.
    assert looks_of(stopping(tiny_job("a", steps=200), Stop.SETTLED)) == (16, 32, 64, 100)
    assert settling_looks(tiny_job("fails", steps=3000), experiment) == ()
    # The second half of what was trained has to lie past the warm-up.
    warming = stopping(job, Stop.SETTLED, warm_up=600)
    assert settling_looks(warming, experiment) == (1200, 1500)
    of_megatron = replace(warming.spec, trainer=MEGATRON)  # which has another key for it
    assert of_megatron.warmup_steps == 0
    named = replace(of_megatron, overrides={"lr_scheduler.lr_warmup_steps": 600})
    assert settling_looks(replace(job, spec=named), experiment) == (1200, 1500)
    unknown = replace(job, spec=replace(job.spec, overrides={}))
    assert settling_looks(unknown, experiment) == ()


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
    stopped = {job.identity: record}
    experiment = plan_of(job).experiment
    assert stopped_again([job], stopped, experiment, RunOptions(look=look), {}) == {}


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
    stopped = {wrong.identity: store.record(wrong.identity)}
    finished = {control.identity: records[2]}
    assert stopped_again([wrong], stopped, longer.experiment, options, finished) == {}
    assert stopped_again([wrong], stopped, plan.experiment, options, finished) == stopped

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


# ------------------------------------------- a control and its repeats, which the sets read


def family(make=tiny_job, stop=Stop.SETTLED, steps=130, sets=("first", "second"), **more):
    """A control, a repeat of it, and sets that are judged by both."""
    control = make("control", role=Role.CONTROL, ranks=1, steps=steps, **more)
    repeat = make("control.ulp", role=Role.REPEAT, ranks=1, steps=steps, **more)
    spec = replace(repeat.spec, name="control")
    repeat = replace(repeat, spec=spec, repeat=Repeat(RepeatKind.ULP))
    tests = [make(name, ranks=1, steps=steps, **more) for name in sets]
    tests = [replace(job, spec=replace(job.spec, control="control")) for job in tests]
    tests = [stopping(job, stop) for job in tests]
    return control, repeat, *tests


def test_a_control_and_its_repeats_are_read_by_every_set_that_is_judged_by_them():
    control, repeat, *tests = family()
    found = read_by(plan_of(control, repeat, *tests))
    assert found == dict.fromkeys((control.identity, repeat.identity), tuple(tests))
    # A calibration that is given replaces the repeats, so that nothing reads them.
    calibrated = plan_of(control, *tests, calibration="given.json")
    assert read_by(calibrated) == {control.identity: tuple(tests)}


def test_what_a_set_needs_that_trains_to_its_end_is_never_ended():
    control, repeat, first, second = family()
    never = replace(second, spec=replace(second.spec, stop=Stop.NEVER))
    assert read_by(plan_of(control, repeat, first, never)) == {}
    assert read_by(plan_of(control, repeat)) == {}  # nothing reads it: it is there for its own sake
    assert read_by(plan_of(control, repeat, first, stop_after=None)) == {}
    assert read_by(plan_of(control, repeat, first, other_seeds=(2,))) == {}
    # Another set, of another control, has the run of this repeat.
    shared = replace(repeat, name="other", role=Role.TEST)
    shared = replace(shared, spec=replace(first.spec, name="other"))
    assert read_by(plan_of(control, repeat, first, shared)) == {}
    # A set of another control is measured by this one, too.
    measured = replace(never, matched="control")
    other = tiny_job("other", role=Role.CONTROL, steps=130)
    measured = replace(measured, spec=replace(measured.spec, control="other"))
    assert read_by(plan_of(control, repeat, first, other, measured)) == {}


def test_a_control_that_is_judged_by_an_anchor_is_never_ended():
    control, repeat, first = family(sets=("first",))
    anchor = tiny_job("anchor", role=Role.ANCHOR, steps=130)
    anchored = plan_of(control, repeat, first, anchor, anchor=anchor.spec)
    experiment = replace(anchored.experiment, controls=(control.spec,))
    assert read_by(replace(anchored, experiment=experiment)) == {}
    second = replace(experiment, controls=(anchor.spec, control.spec))
    assert set(read_by(replace(anchored, experiment=second))) == {
        *(control.identity, repeat.identity)
    }


def test_they_wait_at_the_first_look_and_where_all_their_sets_may_be_settled():
    control, repeat, first, second = family(steps=1000)
    readers = read_by(plan_of(control, repeat, first, second))
    experiment = plan_of().experiment
    for job in (control, repeat, first, second):
        assert wait_steps(job, experiment, readers) == (16, 125, 250, 500)
    warm = replace(second, spec=replace(second.spec, overrides={"lr_scheduler.warmup_steps": 100}))
    readers = read_by(plan_of(control, repeat, first, warm))
    assert wait_steps(control, experiment, readers) == (16, 125, 200, 250, 500)
    assert wait_steps(warm, experiment, readers) == (16, 200, 250, 500)
    # Later it waits for none of them if one trains to its end, unless that fails.
    fails = replace(second, spec=replace(second.spec, stop=Stop.FAIL))
    readers = read_by(plan_of(control, repeat, first, fails))
    assert control.identity in readers
    assert (
        wait_steps(control, experiment, readers) == wait_steps(fails, experiment, readers) == (16,)
    )
    # Where one never stops, sets wait for their control, and it for nobody.
    never = replace(second, spec=replace(second.spec, stop=Stop.NEVER))
    readers = read_by(plan_of(control, repeat, first, never))
    assert wait_steps(control, experiment, readers) == wait_steps(never, experiment, readers) == ()
    assert wait_steps(first, experiment, readers) == (16, 125, 250, 500)


def test_a_run_saves_before_it_waits_unless_few_steps_would_be_lost():
    job = tiny_job("one", steps=1000)
    assert saves_where_it_waits(job, (16, 63, 64, 250)) == (64, 250)
    assert saves_where_it_waits(without_checkpoints(job), (64, 250)) == ()
    own = replace(job, spec=replace(job.spec, overrides={"checkpoint.interval": 100}))
    assert saves_where_it_waits(own, (64, 250)) == ()


@given(st.lists(st.none() | st.integers(1, 100), max_size=4), st.integers(1, 200), st.booleans())
def test_a_run_ends_only_if_every_set_that_reads_it_was_stopped_by_then(sets, step, in_passes):
    job = tiny_job("control", role=Role.CONTROL, steps=150)
    known = bool(sets) and None not in sets and max(sets) <= step < 150
    # One that would begin again ends only while that costs no more than is saved.
    ends = known and (in_passes or step <= 75)
    assert bool(why_to_end(job, step, sets, in_passes=in_passes)) == ends


def test_it_is_said_why_a_control_ends():
    job = tiny_job("control", role=Role.CONTROL, steps=3000)
    assert why_to_end(job, 1203, [16, 1200], in_passes=False) == (
        "every set that is judged by it was stopped after step 1200 at the latest"
    )


def trained(folder, step):
    folder.mkdir()
    line = json.dumps({"kind": "step", "step": step, "loss": 1.0})
    (folder / "metrics.jsonl.part").write_text(line + "\n")
    return folder


def test_a_run_waits_while_a_set_that_reads_it_is_open(tmp_path):
    control, repeat, first, second = family()
    options = RunOptions(
        look=lambda *_: None, read_by=read_by(plan_of(control, repeat, first, second))
    )
    looking = Looks(plan_of().experiment, options, [].append)

    def may_train_on(records, **steps):
        jobs = {job.name: job.identity for job in (control, first, second)}
        training = {jobs[name]: Training(tmp_path, step) for name, step in steps.items()}
        here = {control.identity: 65, **training}
        return looking.may_train_on(control, 65, records, here, in_passes=True)

    def record(job, status, step):
        folder = trained(tmp_path / f"{job.name}-{status}-{step}", step)
        return {job.identity: RunRecord(job.name, job.identity, folder, status, 1.0, ())}

    assert not may_train_on({})  # neither has started
    assert not may_train_on({}, first=65, second=64)
    assert may_train_on({}, first=66)
    settled = record(first, RunStatus.STOPPED, 65)
    assert not may_train_on(settled, second=65)
    assert may_train_on(settled, second=66)
    assert may_train_on(record(first, RunStatus.CRASHED, 3), second=1)
    # Both were stopped: it is ended, and does not train on in the meantime.
    assert not may_train_on(settled | record(second, RunStatus.STOPPED, 16))
    looking = Looks(plan_of().experiment, options, [].append)
    assert may_train_on(settled | record(second, RunStatus.STOPPED, 67))


FAMILY = ("control", "control.ulp")
SETTLED = 130
"""The second look of a run of 260 steps; the first is after 65."""


class Settling:
    """Says of sets that they are settled at that look, once all that they need have come as far."""

    def __init__(self, plan, *settled, since=SETTLED):
        self.plan, self.settled, self.since, self.at = plan, settled, since, {}

    def __call__(self, job, records, training):
        planned = looks(job, self.plan.experiment)
        step = max(each for each in planned if each <= training[job.identity].step)
        needed = self.plan.judged_by(job)
        for each in needed:
            here = training.get(each.identity)
            if each.identity not in records and (here is None or here.step < step):
                return None
        for each in (job, *needed):
            if each.identity in training:
                self.at[each.name, step] = training[each.identity].step
        return "it was settled" if job.name in self.settled and step >= self.since else ""


def options_for(plan, cold, *settled):
    return replace(cold, look=Settling(plan, *settled), read_by=read_by(plan))


def steps_of(record):
    """In the order in which they were trained, of all passes."""
    files = sorted(record.folder.rglob("metrics.jsonl*"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [each["step"] for each in lines if each.get("kind") == "step"]


def going_on(events):
    return {event.job.name: event.reason for event in events if isinstance(event, launch.GoingOn)}


def started(events):
    return sorted(event.job.name for event in events if isinstance(event, launch.Started))


def test_what_settled_sets_are_judged_by_ends_with_them_and_trains_on_for_another_set(
    warm_tiny, store, cold
):
    """With room for one rank: they wait for each other, and nobody trains beyond a look."""
    jobs = family(warm_tiny, steps=260)
    plan = plan_of(*jobs, cpu_ranks=1)
    options = options_for(plan, cold, "first", "second")

    def end_it(event):
        if isinstance(event, launch.Waiting) and (event.job.name, event.step) == (FAMILY[1], 65):
            raise EnoughError

    # Interrupted while the control and its repeat wait: they train on from there.
    with pytest.raises(EnoughError):
        run_plan(plan, store, options, end_it)
    events = []
    records = run_plan(plan, store, options, events.append)
    continued = going_on(events)
    for name in FAMILY:
        assert continued[name] == "from its checkpoint of step 65"
    assert [each.status for each in records] == [RunStatus.STOPPED] * 4
    assert [steps_of(each) for each in records] == [[*range(1, SETTLED + 1)]] * 4
    at = options.look.at
    assert {at[name, 65] for name in ("first", "second")} == {65}
    assert {at[job.name, SETTLED] for job in jobs} == {SETTLED}
    assert records[0].error.message == (
        "every set that is judged by it was stopped after step 130 at the latest; "
        "it ended after step 130 of 260"
    )

    again = run_plan(plan, store, options, lambda event: None)
    assert [each.reused for each in again] == [True] * 4

    # Again, at their last look: what was settled is not trained again either.
    for lost in records[:2]:
        (lost.folder / "record.json").unlink()
    events = []
    again = run_plan(plan, store, options, events.append)
    assert started(events) == ["control", "control.ulp"]
    assert [each.reused for each in again] == [False, False, True, True]
    assert [steps_of(each)[-1] for each in again] == [SETTLED] * 4

    # A set more, which is never settled: what it needs trains to its end, and nothing else does.
    third = family(warm_tiny, steps=260, sets=("third",))[-1]
    more = plan_of(*jobs, third, cpu_ranks=2)
    events = []
    records = run_plan(more, store, options_for(more, cold, "first", "second"), events.append)
    assert started(events) == ["control", "control.ulp", "third"]
    assert going_on(events).keys() == {*FAMILY}
    assert [each.reused for each in records] == [False, False, True, True, False]
    ends = [260, 260, SETTLED, SETTLED, 260]
    assert [steps_of(each) for each in records] == [[*range(1, end + 1)] for end in ends]


def test_a_control_of_wrong_sets_trains_no_step_after_their_first_look(warm_tiny, store, cold):
    """Although it runs before them: there is room for one rank."""
    plan = plan_of(*family(warm_tiny, Stop.FAIL, steps=100, sets=("wrong",)), cpu_ranks=1)
    look = Settling(plan, "wrong", since=16)
    options = replace(cold, look=look, read_by=read_by(plan))
    records = run_plan(plan, store, options, lambda event: None)
    assert [each.status for each in records] == [RunStatus.STOPPED] * 3
    assert [steps_of(each) for each in records] == [[*range(1, 17)]] * 3
    assert not any((each.folder / "passes").exists() for each in records)  # so few need none


def test_nobody_waits_for_ever_for_a_run_that_breaks(warm_tiny, store, cold):
    control, repeat, first = family(warm_tiny, sets=("first",))
    broken = warm_tiny("control.ulp", role=Role.REPEAT, ranks=1, steps=130, mode="crash", at=20)
    broken = replace(broken, spec=replace(broken.spec, name="control"), repeat=repeat.repeat)
    plan = plan_of(control, broken, first, cpu_ranks=1)
    records = run_plan(plan, store, options_for(plan, cold), lambda event: None)
    assert [each.status for each in records] == [
        *(RunStatus.FINISHED, RunStatus.CRASHED, RunStatus.FINISHED)
    ]


def test_runs_that_do_not_fit_into_memory_side_by_side_do_not_wait(warm_tiny, store, cold):
    jobs = family(warm_tiny, sets=("first",))
    plan = plan_of(*jobs, cpu_ranks=1, waiting_ranks=2)
    events = []
    records = run_plan(plan, store, options_for(plan, cold), events.append)
    assert not [event for event in events if isinstance(event, launch.Waiting)]
    assert [each.status for each in records] == [RunStatus.FINISHED] * 3


def test_nobody_waits_any_more_once_a_rank_turns_out_to_need_more_memory(warm_tiny, store, cold):
    """The control already waits, for a repeat of which nobody knew how large it is."""
    control, repeat, first = family(warm_tiny, sets=("first",))
    overrides = {"tiny.memory": 1 << 50}
    repeat = replace(repeat, spec=replace(repeat.spec, overrides=overrides))
    plan = plan_of(control, repeat, first, cpu_ranks=1)
    events = []
    records = run_plan(plan, store, options_for(plan, cold), events.append)
    assert [each.status for each in records] == [RunStatus.FINISHED] * 3
    waiting = [each.job.name for each in events if isinstance(each, launch.Waiting)]
    (notice,) = (each.message for each in events if isinstance(each, launch.Notice))
    assert notice.startswith("a rank of control.ulp has 1048576.0 GiB in memory: runs no longer")
    assert waiting[0] == "control"
    assert "first" not in waiting  # it was not told to wait


def test_no_time_of_a_run_includes_that_in_which_it_waited():
    job = tiny_job("one", steps=30)
    call = RunningCall(Call(), (), Rendezvous(), [])
    about = {"warm": False, "environment": {}, "payload": {}, "tail": None}
    run = Run(job, Path("run"), (0,), 1, None, call, **about)
    run.last, run.made = StepLine(step=11, loss=1.0), 11
    now = time.monotonic()
    run.started, run.first_step_at, run.last_step_at = now - 130.0, now - 120.0, now - 100.0
    run.waiting_since = now - 100.0
    assert run.elapsed_s == pytest.approx(30.0)
    assert run.eta_s == pytest.approx(38.0)  # ten steps took 20 s
    run.train_on((1,))
    assert run.elapsed_s == pytest.approx(30.0, abs=1.0)
    assert run.eta_s == pytest.approx(38.0, abs=1.0)
    assert run.record(RunStatus.STOPPED, None).wall_s == pytest.approx(30.0, abs=1.0)
    assert not run.overdue(plan_of(job, progress_timeout_s=50.0).experiment)


def test_a_run_that_continues_has_begun_once_it_has_loaded_its_checkpoint(tmp_path):
    """Until then it is starting, and needs its slots, although it is to wait again."""

    def write(number, *lines):
        (tmp_path / "passes" / f"{number:03d}").mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "passes" / f"{number:03d}" / "metrics.jsonl.part").write_text(text)

    step = {"kind": "step", "step": 65, "loss": 1.0, "memory_bytes": 5}
    write(1, {"kind": "loaded", "step": 0}, step)
    tail = MetricsTail(tmp_path, in_passes=True)
    call = RunningCall(Call(), (), Rendezvous(), [])
    about = {"warm": False, "environment": {}, "payload": {}}
    run = Run(tiny_job("one"), tmp_path, (0,), 1, None, call, tail=tail, **about)
    assert [line.memory_bytes for line in tail.new_steps()] == [5]
    write(2)
    assert run.new_steps() == ()
    assert not run.has_begun
    write(3, {"kind": "loaded", "step": 65})
    assert run.new_steps() == ()
    assert run.has_begun


def test_a_run_that_another_process_holds_is_left_to_it(store):
    """Whether or not it has been stopped already: it may be before this process would start it."""
    free, held, first, finished = (tiny_job(name) for name in ("a", "b", "c", "d"))
    jobs = (free, held, first, finished)
    records = {}
    for job in (free, held, finished):
        folder = store.run_folder(job.name, job.identity)
        store.start_run(folder, {})
        status = RunStatus.FINISHED if job == finished else RunStatus.STOPPED
        record = RunRecord(job.name, job.identity, folder, status, 1.0, ())
        records[job.identity] = store.finish_run(record, {})
    known = {finished.identity: records[finished.identity]}
    locks = [store.lock(job.identity) for job in (held, first)]
    assert all(lock.acquire() for lock in locks)
    experiment, options = plan_of().experiment, RunOptions(look=lambda *_: None)
    again, stopped, elsewhere = used_again(jobs, known, store, experiment, options)
    assert (again, stopped.keys()) == ({}, {free.identity})
    assert elsewhere == {held.identity, first.identity}
    for lock in locks:
        lock.release()
    assert used_again(jobs, known, store, experiment, options)[2] == frozenset()


# ------------------------------------------------------ two converge processes on one store


class InAnother:
    """Another converge process: runs a plan in a thread, and says what it keeps of which run."""

    def __init__(self, plan, store, options):
        self.begun, self.kept, self.events = threading.Event(), {}, []
        self._store = store
        options = replace(options, read_stopped=self._keep)
        self._thread = threading.Thread(target=self._run, args=(plan, options))

    def _run(self, plan, options):
        self.records = run_plan(plan, self._store, options, self._note)

    def _note(self, event):
        self.events.append(event)
        if isinstance(event, launch.Step):
            self.begun.set()

    def _keep(self, job, record):
        free = self._store.lock(job.identity).is_free()
        self.kept[job.name] = (free, steps_of(record)[-1])

    def __enter__(self):
        self._thread.start()
        assert self.begun.wait(120)
        return self

    def __exit__(self, *_):
        self._thread.join(240)
        assert not self._thread.is_alive()


def test_what_one_process_stops_another_uses_or_trains_on(warm_tiny, store, cold):
    """It is read for the one before the other can have it. None trains before both know that."""
    *jobs, first, third = family(warm_tiny, steps=260, sets=("first", "third"), seconds=0.01)
    plan, more = (plan_of(*jobs, *sets, cpu_ranks=4) for sets in ((first,), (first, third)))
    events = []
    held = store.root / "runs" / "hold-after"
    held.parent.mkdir(parents=True)
    held.write_text("1")

    def note(event):
        events.append(event)
        if sum(isinstance(each, launch.RunsElsewhere) for each in events) == 3:
            held.unlink(missing_ok=True)

    with InAnother(plan, store, options_for(plan, cold, "first")) as other:
        records = run_plan(more, store, options_for(more, cold, "first"), note)
    assert [each.status for each in other.records] == [RunStatus.STOPPED] * 3
    assert other.kept == dict.fromkeys((*FAMILY, "first"), (False, SETTLED))
    waited = {event.job.name for event in events if isinstance(event, launch.RunsElsewhere)}
    assert waited == {*FAMILY, "first"}
    assert going_on(events) == dict.fromkeys(FAMILY, "from its checkpoint of step 130")
    assert [each.reused for each in records] == [False, False, True, False]
    ends = [260, 260, SETTLED, 260]
    assert [steps_of(each) for each in records] == [[*range(1, end + 1)] for end in ends]
    assert all(store.lock(job.identity).is_free() for job in more.jobs)
    assert all(store.wanted(job.identity).is_free() for job in more.jobs)


def test_what_would_begin_again_trains_on_for_the_process_that_waits_for_it(warm_tiny, store, cold):
    *jobs, first, third = family(warm_tiny, steps=260, sets=("first", "third"), seconds=0.01)
    jobs = [without_checkpoints(job) for job in jobs]
    plan, more = (plan_of(*jobs, *sets, cpu_ranks=4) for sets in ((first,), (first, third)))
    with InAnother(plan, store, options_for(plan, cold, "first")) as other:
        records = run_plan(more, store, options_for(more, cold, "first"), lambda event: None)
    ended = [RunStatus.FINISHED, RunStatus.FINISHED, RunStatus.STOPPED]
    assert [each.status for each in other.records] == ended
    assert [each.reused for each in records] == [True, True, True, False]


def without_checkpoints(job):
    can = replace(job.spec.trainer.can, continues=False)
    return replace(job, spec=replace(job.spec, trainer=replace(job.spec.trainer, can=can)))
