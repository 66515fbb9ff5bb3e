"""Plans on a real Slurm, while converge stays: starts, ends, limits, interruptions."""

import json
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_jobs import light_job, light_toolchain, queue, site_of
from harness_processes import harness_processes, read_until
from launch_jobs import plan_of

from converge_harness import launch
from converge_harness.errors import ClusterError
from converge_harness.launch.scheduler.backend import Refused
from converge_harness.launch.scheduler.detached import cancel, collect, status, submit_plan
from converge_harness.launch.scheduler.follow import follow_plan
from converge_harness.launch.scheduler.submission import read_submission
from converge_harness.launch.slurm.commands import Slurm
from converge_harness.launch.stopping import read_by
from converge_harness.model import Recovery, RestartOwner, Role, RunStatus
from converge_harness.store import read_record

pytestmark = pytest.mark.timeout(300)
SEED = {"role": Role.SEED, "ranks": 1, "steps": 1}


@pytest.fixture
def light(tmp_path):
    """Makes jobs that need no torch."""
    toolchain = light_toolchain(tmp_path)
    return lambda name, **values: light_job(toolchain, name, **values)


@pytest.fixture
def site(slurm, tmp_path):
    def make(**values):
        return site_of(tmp_path / "a store", slurm.environment, **values)

    yield make
    slurm.ask("scancel", "--user=root", "--quiet")
    slurm.wait_until_idle()  # a node that was given up comes back by itself (ReturnToService)


def follow(site, *jobs):
    events = []
    records = follow_plan(plan_of(*jobs), site, events.append)
    return {record.name: record for record in records}, events


def kinds(events, job):
    return [type(event).__name__ for event in events if getattr(event, "job", None) == job]


def facts(record):
    return json.loads((record.folder / "record.json").read_text())


def test_a_plan_under_real_torchrun(warm_tiny, site, slurm):
    seed = warm_tiny("seed", **SEED)
    control = warm_tiny("control", role=Role.CONTROL, needs=seed.identity)
    bad = warm_tiny("bad", mode="crash", at=2, needs=seed.identity)
    records, events = follow(site(), seed, control, bad)
    assert [records[name].status for name in ("seed", "control", "bad")] == [
        RunStatus.FINISHED,
        RunStatus.FINISHED,
        RunStatus.CRASHED,
    ]
    assert kinds(events, control) == ["Queued", "Started", *["Step"] * 3, "Ended"]
    error = records["bad"].error
    assert (error.rank, error.message) == (1, "ValueError: a tiny rank was told to crash")
    assert "go_wrong" in error.traceback
    kept = facts(records["control"])
    assert kept["argv"] == ["sbatch", str(records["control"].folder / "job.sh")]
    assert kept["cluster"]["word"] == "COMPLETED"
    assert kept["cluster"]["nodes"] in ("node1", "node2")
    assert kept["job"]["seed_checkpoint"] == str(records["seed"].folder / "checkpoint" / "step-0")
    again, events = follow(site(), seed, control)
    assert all(record.reused for record in again.values())
    assert kinds(events, control) == ["Reused"]
    assert not queue(slurm)


def test_a_finished_job_that_is_not_what_it_was_runs_again(light, site, tmp_path):
    sound, changed, damaged = light("sound"), light("changed"), light("damaged")
    records, _ = follow(site(), sound, changed, damaged)
    assert {record.status for record in records.values()} == {RunStatus.FINISHED}
    module = tmp_path / "my_override.py"
    module.write_text("SCALE = 1\n")
    told = facts(records["changed"])
    told["sources"] = {str(module): "0" * 64}  # as it was when the job ran
    (records["changed"].folder / "record.json").write_text(json.dumps(told))
    with (records["damaged"].folder / "metrics.jsonl").open("a") as metrics:
        metrics.write("{}\n")
    again, events = follow(site(), sound, changed, damaged)
    assert [again[name].reused for name in ("sound", "changed", "damaged")] == [True, False, False]
    said = notices(events)
    assert f"changed runs again: {module}, which it used, has changed" in said
    assert "damaged runs again: metrics.jsonl was changed after the run had finished" in said


def test_the_words_of_a_script_that_fails_before_any_rank(light, site):
    records, _ = follow(site(prologue=("echo no such module >&2; exit 3",)), light("job"))
    error = records["job"].error
    assert (records["job"].status, error.message) == (RunStatus.CRASHED, "no such module")


@pytest.mark.slow  # Slurm's shortest time limit is a minute
def test_a_job_that_exceeds_its_time_limit(light, site):
    records, events = follow(site(time="1"), light("slow", steps=100, seconds=1.0))
    record = records["slow"]
    assert record.status is RunStatus.TIMED_OUT
    steps = [event.step for event in events if isinstance(event, launch.Step)]
    assert record.error.message == (
        f"reached its time limit of 1 ([cluster] time) after step {steps[-1]} of 100"
    )
    assert record.wall_s >= 60


def test_a_job_that_stands_still_is_ended(light, site):
    limits = {"progress_timeout_s": 2.0}
    records, _ = follow(site(limits=limits), light("stuck", mode="hang", at=2))
    assert records["stuck"].status is RunStatus.HUNG
    assert "no step finished for 2 s after step 1" in records["stuck"].error.message
    assert facts(records["stuck"])["cluster"]["word"] == "CANCELLED"


def test_an_impossible_request_is_refused_while_others_run(light, site):
    possible, impossible = light("one", ranks=1), light("huge", ranks=4)
    records, events = follow(site(ranks_per_node=1), possible, impossible)
    assert records["one"].status is RunStatus.FINISHED
    assert records["huge"].status is RunStatus.REFUSED
    assert "Node count specification invalid" in records["huge"].error.message
    assert kinds(events, impossible) == ["Ended"]


def test_a_job_that_pends_for_ever_is_refused_and_leaves_the_queue(light, site, slurm):
    def lower_the_limit(event):
        # Once the job waits, as where EnforcePartLimits is off.
        if isinstance(event, launch.Queued):
            slurm.ask("scontrol", "update", "PartitionName=main", "MaxTime=1")
            slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")

    slurm.ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        (record,) = follow_plan(plan_of(light("held", ranks=1)), site(), lower_the_limit)
    finally:
        slurm.ask("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE", "State=UP")
    assert record.status is RunStatus.REFUSED
    assert "PartitionTimeLimit" in record.error.message
    assert not queue(slurm)


def test_a_job_that_pended_for_ever_is_submitted_again_and_refused_by_sbatch(light, site, slurm):
    site, job = site(), light("held", ranks=1)
    slurm.ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    submit_plan(plan_of(job), site, lambda event: None)
    slurm.ask("scontrol", "update", "PartitionName=main", "MaxTime=1")
    slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")
    try:
        slurm.wait_for_reason("PartitionTimeLimit")
        records, events = follow(site, job)
    finally:
        slurm.ask("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")
    # The first is taken out of the queue, as one that failed; the limit is now known at once.
    assert "runs again: held (refused before)" in notices(events)
    assert records["held"].status is RunStatus.REFUSED
    assert "Requested time limit is invalid" in records["held"].error.message
    assert not queue(slurm)


def test_what_needs_a_failed_seed_is_skipped(light, site, slurm):
    seed = light("seed", mode="crash", **SEED)
    control = light("control", role=Role.CONTROL, needs=seed.identity)
    other = light("other", needs=seed.identity)
    records, events = follow(site(max_jobs=2), seed, control, other)
    assert [record.status for record in records.values()] == [
        RunStatus.CRASHED,
        RunStatus.SKIPPED,
        RunStatus.SKIPPED,
    ]
    assert records["other"].error.message == (
        "not started: seed, whose weights it needs, crashed: " + records["seed"].error.text
    )
    assert kinds(events, other) == ["Queued", "Ended"]
    assert not queue(slurm)


def test_never_more_jobs_at_once_than_asked_for(light, site):
    jobs = [light(f"job {number}", ranks=1, steps=2, seconds=0.2) for number in range(30)]
    records, _ = follow(site(max_jobs=4), *jobs)
    assert {record.status for record in records.values()} == {RunStatus.FINISHED}
    stamps = []
    for record in records.values():
        begun, ended = (float((record.folder / name).read_text()) for name in ("lives", "over"))
        stamps += [(begun, 1), (ended, -1)]
    at_once, most = 0, 0
    for _, change in sorted(stamps):
        at_once += change
        most = max(most, at_once)
    assert most <= 4
    lanes = [read_submission(record.folder).after_any for record in records.values()]
    assert [len(waits) for waits in lanes] == [0] * 4 + [1] * 26


def test_a_node_that_fails_gives_its_job_back_to_the_queue(light, site, slurm):
    job = light("moved", steps=3, mode="hang once", at=3)

    def lose_the_node(event):
        events.append(event)
        if isinstance(event, launch.Step) and event.step == 2 and len(lost) == 0:
            lost.append(started()[-1].nodes)
            slurm.down(lost[0])

    def started():
        return [event for event in events if isinstance(event, launch.Started)]

    events, lost = [], []
    (record,) = follow_plan(plan_of(job), site(), lose_the_node)
    assert record.status is RunStatus.FINISHED
    steps = [event.step for event in events if isinstance(event, launch.Step)]
    assert steps == [1, 2, 1, 2, 3]
    (again,) = [event for event in events if isinstance(event, launch.GoingOn)]
    assert again.reason == "requeued by Slurm, restart 1"
    assert facts(record)["cluster"]["restarts"] == 1
    assert read_record(record.folder).requeues == 1
    (row,) = status(plan_of(job), site())
    assert (row.state, row.requeues) == ("finished", 1)


def test_a_start_that_ended_between_two_polls_is_reported_completely(light, site, slurm):
    def lose_the_node(event):
        events.append(event)
        if isinstance(event, launch.Step) and event.step == 2 and not lost:
            lost.append(next(each.nodes for each in events if isinstance(each, launch.Started)))
            slurm.down(lost[0])
            while queue(slurm):  # the follower stands still meanwhile
                time.sleep(0.1)

    events, lost = [], []
    job = light("unseen", steps=3, mode="hang once", at=3)
    (record,) = follow_plan(plan_of(job), site(), lose_the_node)
    assert record.status is RunStatus.FINISHED
    assert kinds(events, job) == [
        *("Queued", "Started", "Step", "Step", "GoingOn", "Step", "Step", "Step", "Ended")
    ]


def test_a_job_that_loses_its_node_and_may_not_be_requeued(light, site, slurm):
    def lose_the_node(event):
        if isinstance(event, launch.Step) and not lost:
            lost.append(status(plan_of(job), place)[0].nodes)
            slurm.down(lost[0])

    lost, job, place = [], light("lost", mode="hang", at=2), site(requeue=False)
    (record,) = follow_plan(plan_of(job), place, lose_the_node)
    assert record.status is RunStatus.CRASHED
    assert record.error.message.startswith("Slurm: NODE_FAIL")
    assert record.error.message.endswith(f"on {lost[0]}, after step 1 of 3")


class Narrow(Slurm):
    """A Slurm that lets a user have so many jobs, as an association's MaxSubmitJobs does."""

    most = 2

    def submit(self, request):
        if len(self._ask("squeue", "--me", "--noheader").splitlines()) >= self.most:
            raise Refused("job submit limit", for_now=True)
        return super().submit(request)


class Deaf(Slurm):
    """A Slurm that gives no answer at first."""

    polls = 0

    def poll(self, ids):
        self.polls += 1
        if self.polls in (2, 3):
            raise ClusterError("squeue cannot reach Slurm")
        return super().poll(ids)


class Reluctant(Slurm):
    """A Slurm that takes no job at first."""

    asked = 0

    def submit(self, request):
        self.asked += 1
        if self.asked == 1:
            raise Refused("job submit limit", for_now=True)
        return super().submit(request)


def with_backend(site, kind):
    return replace(site, backend=kind(site.backend._environment))


def test_what_slurm_does_not_take_for_now_is_submitted_later(light, site):
    place = with_backend(site(), Narrow)
    jobs = [light(f"job {number}", ranks=1, seconds=0.1) for number in range(5)]
    first = submit_plan(plan_of(*jobs), place, lambda event: None)
    assert (first.submitted, len(first.left), first.why_left) == (2, 3, "job submit limit")
    records, events = follow(place, *jobs)
    assert {record.status for record in records.values()} == {RunStatus.FINISHED}
    assert "jobs will be submitted later: job submit limit" in notices(events)


def test_a_scheduler_that_is_silent_for_a_while(light, site):
    records, events = follow(with_backend(site(), Deaf), light("one", seconds=0.2))
    assert records["one"].status is RunStatus.FINISHED
    assert notices(events).count("squeue cannot reach Slurm; retrying") == 1


def notices(events):
    return " ".join(event.message for event in events if isinstance(event, launch.Notice))


# ----------------------------------------------------------- several harnesses


def test_cancelled_by_somebody_else(light, site, slurm):
    def scancel(event):
        if isinstance(event, launch.Step):
            slurm.ask("scancel", "--user=root")

    (record,) = follow_plan(plan_of(light("one", mode="hang", at=2)), site(), scancel)
    assert record.status is RunStatus.CANCELLED
    assert record.error.message == "cancelled, not by converge, after step 1 of 3"


def test_cancelled_by_another_converge(light, site, slurm):
    place, jobs = site(), [light("one", mode="hang", at=2), light("two", seconds=0.3)]

    def cancel_one(event):
        if isinstance(event, launch.Step) and event.job == jobs[0]:
            done = cancel(
                plan_of(*jobs),
                place,
                lambda event: None,
                wanted=lambda job: job == jobs[0],
                why="cancelled by converge cancel (me)",
            )
            assert [record.name for record in done.cancelled] == ["one"]

    one, two = follow_plan(plan_of(*jobs), place, cancel_one)
    assert (one.status, two.status) == (RunStatus.CANCELLED, RunStatus.FINISHED)
    assert one.error.message == "cancelled by converge cancel (me), after step 1 of 3"


def test_submitted_twice_runs_once(light, site, slurm):
    place, plan = site(), plan_of(light("seed", **SEED), light("slow", mode="hang"))
    first = submit_plan(plan, place, lambda event: None)
    second = submit_plan(plan, place, lambda event: None)
    assert (first.submitted, first.queued) == (2, 0)
    assert second.submitted == 0
    assert second.queued + second.reused == 2
    assert [name for name, _ in queue(slurm)].count(f"cv-slow-{plan.jobs[1].identity[:12]}") == 1
    rows = {row.name: row for row in status(plan, place)}
    assert rows["slow"].state in ("pending", "running")
    assert rows["slow"].job_id.isdecimal()


def test_a_job_whose_id_was_never_written_down_is_found_again(light, site, slurm):
    place, plan = site(), plan_of(light("slow", mode="hang"))
    submit_plan(plan, place, lambda event: None)
    (folder,) = (place.store.root / "runs").iterdir()
    path = folder / "submission.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "job_id": None}))  # killed right after sbatch
    assert status(plan, place)[0].state == "submission interrupted"
    submit_plan(plan, place, lambda event: None)
    assert json.loads(path.read_text())["job_id"] == told["job_id"]
    assert len(queue(slurm)) == 1


def test_jobs_that_were_submitted_before_are_followed(light, site):
    place, job = site(), light("one", steps=2, seconds=0.5)
    submit_plan(plan_of(job), place, lambda event: None)
    records, events = follow(place, job)
    assert records["one"].status is RunStatus.FINISHED
    assert "Queued" not in kinds(events, job)


def test_collecting_writes_records_of_what_is_over_and_names_the_rest(light, site, slurm):
    place = site()
    plan = plan_of(light("bad", mode="crash"), light("slow", mode="hang"))
    submit_plan(plan, place, lambda event: None)
    wait_for(lambda: status(plan, place)[0].state == "crashed")
    assert not status(plan, place)[0].recorded
    collected = collect(plan, place, lambda event: None)
    (bad,) = collected.records.values()
    assert "a tiny node was told to crash" in bad.error.message
    assert [each.job.name for each in collected.left] == ["slow"]
    assert status(plan, place)[0].recorded


# ------------------------------------------------------------------- signals


@pytest.fixture
def harness(site, slurm, tmp_path):
    """Starts a real harness process that follows a plan; ends it if the test has not."""
    light_toolchain(tmp_path)
    environment = slurm.environment | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    program = Path(__file__).parent / "tiny_follower.py"
    with harness_processes(program, tmp_path, env=environment) as start:
        yield start


def wait_for(what, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_interrupted_harness_cancels_what_it_submitted(harness, light, site, slurm):
    theirs = light("theirs", steps=100, seconds=1.0)
    submit_plan(plan_of(theirs), site(), lambda event: None)
    process = harness("theirs:100:1.0", "long:100:1.0", "short:1:0.0")
    read_until(process, "Ended short")
    read_until(process, "Step long")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    wait_for(lambda: [name[:9] for name, _ in queue(slurm)] == ["cv-theirs"])
    long, short = light("long", steps=100, seconds=1.0), light("short", steps=1, seconds=0.0)
    collected = collect(plan_of(long, short), site(), lambda event: None)
    assert collected.records[long.identity].status is RunStatus.CANCELLED
    assert "cancelled by converge (stopped by SIGINT)" in (
        collected.records[long.identity].error.message
    )
    assert collected.records[short.identity].status is RunStatus.FINISHED


def test_a_set_that_is_certain_to_fail_is_cancelled_and_not_submitted_again(light, site):
    def look(job, records, training):
        if control.identity not in records:
            return None
        return "its FAIL was certain (loss-first-step)" if job == wrong else ""

    control = light("control", role=Role.CONTROL, ranks=1, steps=2)
    wrong = light("wrong", ranks=1, steps=10_000, seconds=0.05)
    right = light("right", ranks=1, steps=6, seconds=0.05)
    given = site(limits={"stop_after": 3})
    given = replace(given, options=replace(given.options, look=look))
    records, _ = follow(given, control, wrong, right)
    assert [records[name].status for name in ("control", "wrong", "right")] == [
        RunStatus.FINISHED,
        RunStatus.STOPPED,
        RunStatus.FINISHED,
    ]
    message = records["wrong"].error.message
    said = r"its FAIL was certain \(loss-first-step\); it ended after step \d+ of 10000"
    assert re.fullmatch(said, message), message
    assert read_submission(records["wrong"].folder).stopped

    again, events = follow(given, control, wrong, right)
    assert all(record.reused for record in again.values())
    assert again["wrong"].status is RunStatus.STOPPED
    assert not any(isinstance(event, launch.Queued) for event in events)


def test_a_control_is_cancelled_once_every_set_that_reads_it_was(light, site):
    def look(job, records, training):
        here = training.get(control.identity)
        return "its FAIL was certain (loss-first-step)" if here and here.step >= 3 else None

    control = light("control", role=Role.CONTROL, ranks=1, steps=10_000, seconds=0.05)
    wrong = light("wrong", ranks=1, steps=10_000, seconds=0.05)
    wrong = replace(wrong, spec=replace(wrong.spec, control="control"))
    given = site(limits={"stop_after": 3})
    readers = read_by(plan_of(control, wrong, stop_after=3))
    given = replace(given, options=replace(given.options, look=look, read_by=readers))
    records, _ = follow(given, control, wrong)
    assert {each.status for each in records.values()} == {RunStatus.STOPPED}
    message = records["control"].error.message
    assert re.fullmatch(
        r"every set that is judged by it was stopped after step (\d+) at the latest; "
        r"it ended after step \d+ of 10000",
        message,
    ), message
    assert read_submission(records["control"].folder).stopped

    again, events = follow(given, control, wrong)
    assert all(record.reused for record in again.values())
    assert not any(isinstance(event, launch.Queued) for event in events)


def test_a_stopped_job_continues_from_its_checkpoint_when_it_is_submitted_again(warm_tiny, site):
    recovery = Recovery((), 4, RestartOwner.CLUSTER, max_restarts=0)
    job = warm_tiny("long", ranks=1, steps=60, seconds=0.05)
    job = replace(job, spec=replace(job.spec, recovery=recovery))
    given = site(rank_module="tiny_passes", limits={"stop_after": 6})
    settled = replace(given.options, look=lambda job, records, training: "it was settled")
    records, _ = follow(replace(given, options=settled), job)
    assert records["long"].status is RunStatus.STOPPED

    # That Slurm does not take it at first loses nothing.
    records, events = follow(with_backend(given, Reluctant), job)
    assert "submitted later: job submit limit" in notices(events)
    assert records["long"].status is RunStatus.FINISHED
    assert {each.name for each in records["long"].folder.glob("logs/call-*")} == {
        *("call-01", "call-02"),
    }
    (goes_on,) = [event for event in events if isinstance(event, launch.GoingOn)]
    second = records["long"].folder / "passes" / "002" / "metrics.jsonl"
    lines = [json.loads(line) for line in second.read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == [*range(steps[0], 61)]
    assert steps[0] > 4
    assert goes_on.reason == f"from its checkpoint of step {steps[0] - 1}"


def test_an_interrupted_plan_can_be_run_again_at_once(harness, light, site):
    process = harness("one:3:2.0")
    read_until(process, "Step one")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    records, _ = follow(site(), light("one", steps=3, seconds=2.0))
    assert records["one"].status is RunStatus.FINISHED


def test_what_a_killed_harness_left_is_collected(harness, light, site, slurm):
    process = harness("one:3:1.0", "bad:3:0.0:crash")
    read_until(process, "Step one")
    process.kill()
    process.wait()
    wait_for(lambda: not queue(slurm))
    one, bad = light("one", seconds=1.0), light("bad", seconds=0.0, mode="crash")
    collected = collect(plan_of(one, bad), site(), lambda event: None)
    assert not collected.left
    assert collected.records[one.identity].status is RunStatus.FINISHED
    assert collected.records[bad.identity].status is RunStatus.CRASHED
