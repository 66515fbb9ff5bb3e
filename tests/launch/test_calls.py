"""Runs in several passes under real torchrun: segments, faults, restarts by torchrun and by us.

The jobs of all tests run in one matrix of each kind of start, which is what takes the time.
"""

import json
import os
import signal
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from launch_jobs import ROOT, broken, elastic, plan_of, tiny_job

from converge_harness import launch
from converge_harness.launch import RunOptions, run_plan
from converge_harness.model import (
    Fault,
    FaultKind,
    RestartOwner,
    RunRecord,
    RunStatus,
    Torn,
)
from converge_harness.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TORCHRUN = RestartOwner.TORCHRUN


def hanging(name, **values):
    """Hangs in step 3; its healthy steps take longer than a hang may last."""
    job = tiny_job(name, steps=4, seconds=1.5)
    return broken(job, Fault(FaultKind.HANG, 3), within_s=2.0, **values)


def killed(name, **values):
    return broken(tiny_job(name, steps=5), Fault(FaultKind.KILL, 4, rank=1), **values)


def preempted(name):
    return broken(tiny_job(name, steps=5), Fault(FaultKind.PREEMPT, 3))


def deaf(name):
    """Torchrun itself would give its ranks longer."""
    job = tiny_job(name, steps=5, mode="ignores SIGTERM", at=3)
    return broken(job, Fault(FaultKind.PREEMPT, 3, grace_s=1.0))


def torn(name, how):
    """Crashes in the end, and so keeps its checkpoints."""
    job = tiny_job(name, steps=6, mode="crash", at=6)
    return broken(job, Fault(FaultKind.CKPT_TORN, 4, torn=how), max_restarts=2)


WARM = (
    # First, as it takes longest.
    broken(
        tiny_job("lost and joined", steps=7),
        Fault(FaultKind.AGENT_LOSS, 3),
        Fault(FaultKind.JOIN, 5),
        restarts=TORCHRUN,
        nodes=(1, 2),
    ),
    elastic(tiny_job("elastic"), (2, 2), (3, 1), (5, 3)),
    elastic(tiny_job("elastic crash", mode="crash", at=3), (2, 2), (4, 1)),
    elastic(tiny_job("elastic forget", mode="forget"), (2, 1), (4, 1)),
    killed("killed", restarts=TORCHRUN),
    hanging("hung"),
    hanging("hung in the end", max_restarts=0),
    preempted("preempted"),
    deaf("preempted and deaf"),
    torn("torn death", Torn.DEATH),
    torn("torn truncated", Torn.TRUNCATED),
    broken(tiny_job("bad again", steps=5, mode="crash", at=4), max_restarts=2),
    broken(tiny_job("bad at once", mode="crash", at=1)),
)
COLD = (
    broken(tiny_job("joined", steps=6), Fault(FaultKind.JOIN, 3), restarts=TORCHRUN, nodes=(1, 2)),
    killed("killed cold"),
    preempted("preempted cold"),
)


@dataclass(frozen=True)
class Ran:
    record: RunRecord
    events: tuple

    @property
    def passes(self):
        """Of each pass: world size, step that was loaded, steps, whether it ended well."""
        found = []
        for folder in sorted((self.record.folder / "passes").iterdir()):
            part, whole = folder / "metrics.jsonl.part", folder / "metrics.jsonl"
            ended = whole.exists()
            text = (whole if ended else part).read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            steps = [line["step"] for line in lines if line["kind"] == "step"]
            found.append((lines[0]["world_size"], lines[1]["step"], steps, ended))
        return found

    @property
    def calls(self):
        return json.loads((self.record.folder / "record.json").read_text())["calls"]

    def told(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def told_steps(self):
        return [event.step for event in self.told(launch.Step)]


def run(jobs, toolchain, folder, *, warm):
    """What became of every job of one matrix, by name."""
    jobs = tuple(replace(job, toolchain=toolchain) for job in jobs)
    options = RunOptions(warm=warm, check=False, rank_module="tiny_passes", grace_s=2.0)
    events = []
    before = set(psutil.Process().children(recursive=True))
    records = run_plan(plan_of(*jobs, cpu_ranks=6), Store(folder), options, events.append)
    assert set(psutil.Process().children(recursive=True)) == before
    return {
        job.name: Ran(
            record,
            tuple(event for event in events if getattr(event, "job", None) == job),
        )
        for job, record in zip(jobs, records, strict=True)
    }


@pytest.fixture(scope="module")
def ran(toolchain, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{Path(__file__).parent}")
        folder = tmp_path_factory.mktemp("passes")
        cold = run(COLD, toolchain, folder / "cold", warm=False)
        return cold | run(WARM, toolchain, folder / "warm", warm=True)


def test_segments_run_in_order_in_one_folder_each_with_its_own_ranks(ran):
    one = ran["elastic"]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [(2, 0, [1, 2], True), (1, 2, [3], True), (3, 3, [4, 5], True)]
    assert one.told_steps == [1, 2, 3, 4, 5]
    (started,) = one.told(launch.Started)
    assert len(started.slots) == 3
    assert [event.reason for event in one.told(launch.GoingOn)] == [
        "segment 2 of 3",
        "segment 3 of 3",
    ]
    calls = one.calls
    assert [(call["segment"], call["returncode"]) for call in calls] == [(0, 0), (1, 0), (2, 0)]
    assert all(call["started"] < call["ended"] for call in calls)
    assert one.record.argv == tuple(calls[0]["argv"])
    assert not (one.record.folder / "checkpoint").exists()


def test_a_segment_that_crashes_is_named_and_its_checkpoint_kept(ran):
    record = ran["elastic crash"].record
    assert record.status is RunStatus.CRASHED
    assert record.error.message == (
        "segment 2 (steps 3 to 4): ValueError: a tiny rank was told to crash"
    )
    assert (record.folder / "checkpoint" / "step-2").is_dir()


def test_a_segment_without_its_checkpoint_is_the_last(ran):
    record = ran["elastic forget"].record
    assert record.status is RunStatus.CRASHED
    assert "(steps 1 to 2): wrote no complete checkpoint of step 2" in record.error.message


def test_torchrun_restarts_its_ranks_in_place(ran):
    one = ran["killed"]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [(2, 0, [1, 2, 3], False), (2, 2, [3, 4, 5], True)]
    assert one.told_steps == [1, 2, 3, 3, 4, 5]
    assert len(one.calls) == 1


def test_the_harness_starts_ranks_again_and_tells_replayed_steps(ran):
    one = ran["killed cold"]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [(2, 0, [1, 2, 3], False), (2, 2, [3, 4, 5], True)]
    assert one.told_steps == [1, 2, 3, 3, 4, 5]
    assert [call["returncode"] for call in one.calls] == [1, 0]
    (again,) = one.told(launch.GoingOn)
    assert again.reason == "restarted by converge, 1 of at most 3 times"


def test_a_rank_that_hangs_is_started_again_and_slow_steps_are_not(ran):
    one = ran["hung"]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [(2, 0, [1, 2], False), (2, 2, [3, 4], True)]
    (again,) = one.told(launch.GoingOn)
    assert again.reason == (
        "restarted by converge, 1 of at most 3 times: "
        "no step finished for 1 s after a rank was made to hang"
    )


def test_a_rank_that_hangs_in_the_end_is_a_hang(ran):
    assert ran["hung in the end"].record.status is RunStatus.HUNG


def test_a_rank_that_does_not_stop_in_the_time_that_its_fault_gives_is_killed(ran):
    one = ran["preempted and deaf"]
    assert one.record.status is RunStatus.FINISHED, one.record.error
    assert one.passes == [(2, 0, [1, 2, 3], False), (2, 2, [3, 4, 5], True)]
    first, _ = one.calls
    assert first["returncode"] == -signal.SIGKILL, first  # 1 if torchrun has ended them
    struck = json.loads((one.record.folder / "faults" / "0.json").read_text())
    took_s = datetime.fromisoformat(first["ended"]).timestamp() - struck["at"]
    assert took_s < 25, took_s  # torchrun would wait for more than a minute


@pytest.mark.parametrize("name", ["preempted", "preempted cold"])
def test_a_preempted_job_goes_on_from_its_checkpoint(ran, name):
    one = ran[name]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [(2, 0, [1, 2, 3], False), (2, 2, [3, 4, 5], True)]
    struck = json.loads((one.record.folder / "faults" / "0.json").read_text())
    assert (struck["kind"], struck["step"], struck["pass"]) == ("preempt", 3, 1)
    assert (one.record.folder / "faults" / "0.over.json").exists()


@pytest.mark.parametrize("how", Torn)
def test_a_torn_checkpoint_is_set_aside_and_never_loaded(ran, how):
    one = ran[f"torn {how}"]
    assert one.passes[:2] == [(2, 0, [1, 2, 3, 4], False), (2, 2, [3, 4, 5], False)]
    aside = one.record.folder / "torn" / "step-4"
    assert (aside / "shard").exists()
    assert (aside / ".metadata").exists() == (how is Torn.TRUNCATED)
    assert (one.record.folder / "checkpoint" / "step-4" / ".metadata").exists()


def test_a_run_that_fails_again_and_again_ends_with_its_last_error(ran):
    one = ran["bad again"]
    assert one.record.status is RunStatus.CRASHED
    assert len(one.calls) == 2  # the first had saved step 2
    assert one.record.error.message == (
        "failed, but not by a fault of the script, and a restart would come no further without a "
        "later complete checkpoint: ValueError: a tiny rank was told to crash"
    )


def test_an_error_before_any_step_is_not_tried_again(ran):
    one = ran["bad at once"]
    assert one.record.status is RunStatus.CRASHED
    assert len(one.calls) == 1
    assert one.record.error.message.startswith("failed before any step")


def test_nodes_start_together_one_is_lost_and_another_joins(ran):
    one = ran["lost and joined"]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [
        (2, 0, [1, 2, 3], False),
        (1, 2, [3, 4, 5], False),
        (2, 4, [5, 6, 7], True),
    ]
    assert len(one.calls) == 1


def test_a_node_joins_one_that_began_alone(ran):
    one = ran["joined"]
    assert one.record.status is RunStatus.FINISHED
    assert one.passes == [(1, 0, [1, 2, 3], False), (2, 2, [3, 4, 5, 6], True)]
