"""Runs in several passes under real torchrun: segments, faults, restarts by torchrun and by us."""

import json
from dataclasses import replace

import psutil
import pytest
from launch_jobs import plan_of

from harness import launch
from harness.launch import RunOptions, run_plan
from harness.model import (
    Fault,
    FaultKind,
    Parallelism,
    Recovery,
    RestartOwner,
    RunStatus,
    Segment,
    Torn,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["cold", "warm"])
def options(request):
    return RunOptions(
        warm=request.param == "warm", check=False, rank_module="tiny_passes", grace_s=2.0
    )


@pytest.fixture
def cold():
    return RunOptions(warm=False, check=False, rank_module="tiny_passes", grace_s=2.0)


def elastic(job, *segments):
    """Of ``(until, ranks)`` each."""
    made = tuple(Segment(until, Parallelism(dp_shard=ranks), 1) for until, ranks in segments)
    spec = replace(job.spec, segments=made, parallelism=made[0].parallelism)
    return replace(job, spec=spec, steps=made[-1].until)


def broken(job, *faults, **values):
    recovery = Recovery(faults, **{"checkpoint_every": 2, "within_s": 60.0, **values})
    return replace(job, spec=replace(job.spec, recovery=recovery))


def run(job, store, options, **limits):
    events = []
    before = set(psutil.Process().children(recursive=True))
    (record,) = run_plan(plan_of(job, **limits), store, options, events.append)
    assert set(psutil.Process().children(recursive=True)) == before
    return record, events


def passes(record):
    """Of each pass: world size, step that was loaded, steps, whether it ended well."""
    found = []
    for folder in sorted((record.folder / "passes").iterdir()):
        part, whole = folder / "metrics.jsonl.part", folder / "metrics.jsonl"
        ended = whole.exists()
        text = (whole if ended else part).read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        found.append((lines[0]["world_size"], lines[1]["step"], steps, ended))
    return found


def told_steps(events):
    return [event.step for event in events if isinstance(event, launch.Step)]


def facts(record):
    return json.loads((record.folder / "record.json").read_text())


def test_segments_run_in_order_in_one_folder_each_with_its_own_ranks(tiny, store, options):
    record, events = run(elastic(tiny("elastic"), (2, 2), (3, 1), (5, 3)), store, options)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(2, 0, [1, 2], True), (1, 2, [3], True), (3, 3, [4, 5], True)]
    assert told_steps(events) == [1, 2, 3, 4, 5]
    started = next(event for event in events if isinstance(event, launch.Started))
    assert len(started.slots) == 3
    calls = facts(record)["calls"]
    assert [(call["segment"], call["returncode"]) for call in calls] == [(0, 0), (1, 0), (2, 0)]
    assert all(call["started"] < call["ended"] for call in calls)
    assert record.argv == tuple(calls[0]["argv"])
    assert not (record.folder / "checkpoint").exists()


def test_a_segment_that_crashes_is_named_and_its_checkpoint_kept(tiny, store, cold):
    job = elastic(tiny("elastic", mode="crash", at=3), (2, 2), (4, 1))
    record, _ = run(job, store, cold)
    assert record.status is RunStatus.CRASHED
    assert record.error.message == (
        "segment 2 (steps 3 to 4): ValueError: a tiny rank was told to crash"
    )
    assert (record.folder / "checkpoint" / "step-2").is_dir()


def test_a_segment_without_its_checkpoint_is_the_last(tiny, store, cold):
    record, _ = run(elastic(tiny("elastic", mode="forget"), (2, 1), (4, 1)), store, cold)
    assert record.status is RunStatus.CRASHED
    assert "segment 1 (steps 1 to 2): left no whole checkpoint/step-2" in record.error.message


def test_torchrun_restarts_its_ranks_in_place(tiny, store, options):
    job = broken(
        tiny("kill", steps=4), Fault(FaultKind.KILL, 3, rank=1), restarts=RestartOwner.TORCHRUN
    )
    record, events = run(job, store, options)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(2, 0, [1, 2], False), (2, 2, [3, 4], True)]
    assert told_steps(events) == [1, 2, 3, 4]
    assert len(facts(record)["calls"]) == 1


def test_the_harness_starts_ranks_again_and_tells_replayed_steps(tiny, store, options):
    job = broken(tiny("kill", steps=5), Fault(FaultKind.KILL, 4, rank=1))
    record, events = run(job, store, options)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(2, 0, [1, 2, 3], False), (2, 2, [3, 4, 5], True)]
    assert told_steps(events) == [1, 2, 3, 3, 4, 5]
    assert [call["returncode"] for call in facts(record)["calls"]] == [1, 0]
    (again,) = (event for event in events if isinstance(event, launch.GoingOn))
    assert again.reason == "restart 1 of at most 3"


def test_a_rank_that_hangs_is_started_again(tiny, store, cold):
    job = broken(tiny("hang", steps=4), Fault(FaultKind.HANG, 3), within_s=24.0)
    record, events = run(job, store, cold)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(2, 0, [1, 2], False), (2, 2, [3, 4], True)]
    (again,) = (event for event in events if isinstance(event, launch.GoingOn))
    assert "no step finished for 12 s after step 2" in again.reason


def test_a_rank_that_hangs_in_the_end_is_a_hang(tiny, store, cold):
    job = broken(tiny("hang", steps=4), Fault(FaultKind.HANG, 3), within_s=24.0, max_restarts=0)
    record, _ = run(job, store, cold)
    assert record.status is RunStatus.HUNG


@pytest.mark.parametrize("owner", RestartOwner)
def test_a_preempted_job_goes_on_from_its_checkpoint(tiny, store, options, owner):
    job = broken(tiny("preempt", steps=5), Fault(FaultKind.PREEMPT, 3), restarts=owner)
    record, _ = run(job, store, options)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(2, 0, [1, 2, 3], False), (2, 2, [3, 4, 5], True)]
    struck = json.loads((record.folder / "faults" / "0.json").read_text())
    assert (struck["kind"], struck["step"], struck["pass"]) == ("preempt", 3, 1)
    assert (record.folder / "faults" / "0.over.json").exists()


@pytest.mark.parametrize("torn", Torn)
def test_a_torn_checkpoint_is_set_aside_and_never_loaded(tiny, store, cold, torn):
    job = broken(
        tiny("torn", steps=6, mode="crash", at=6), Fault(FaultKind.CKPT_TORN, 4, torn=torn)
    )
    record, _ = run(job, store, cold)  # crashes in the end, and so keeps its checkpoints
    assert passes(record)[:2] == [(2, 0, [1, 2, 3, 4], False), (2, 2, [3, 4, 5], False)]
    aside = record.folder / "torn" / "step-4"
    assert (aside / "shard").exists()
    assert (aside / ".metadata").exists() == (torn is Torn.TRUNCATED)
    assert (record.folder / "checkpoint" / "step-4" / ".metadata").exists()


def test_a_run_that_fails_again_and_again_ends_with_its_last_error(tiny, store, cold):
    job = broken(tiny("bad", steps=5, mode="crash", at=4), max_restarts=2)
    record, _ = run(job, store, cold)
    assert record.status is RunStatus.CRASHED
    assert len(facts(record)["calls"]) == 3
    assert record.error.message == (
        "failed again after 2 restarts, which is max_restarts: "
        "ValueError: a tiny rank was told to crash"
    )


def test_an_error_before_any_step_is_not_tried_again(tiny, store, cold):
    record, _ = run(broken(tiny("bad", mode="crash", at=1)), store, cold)
    assert record.status is RunStatus.CRASHED
    assert len(facts(record)["calls"]) == 1
    assert record.error.message.startswith("failed before any step")


def test_a_lost_node_leaves_the_other_to_go_on(tiny, store, cold):
    job = broken(
        tiny("loss", steps=6),
        Fault(FaultKind.AGENT_LOSS, 3),
        restarts=RestartOwner.TORCHRUN,
        nodes=(1, 2),
    )
    record, _ = run(job, store, cold)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(2, 0, [1, 2, 3], False), (1, 2, [3, 4, 5, 6], True)]


def test_a_node_joins(tiny, store, cold):
    job = broken(
        tiny("join", steps=6),
        Fault(FaultKind.JOIN, 3),
        restarts=RestartOwner.TORCHRUN,
        nodes=(1, 2),
    )
    record, _ = run(job, store, cold)
    assert record.status is RunStatus.FINISHED
    assert passes(record) == [(1, 0, [1, 2, 3], False), (2, 2, [3, 4, 5, 6], True)]
