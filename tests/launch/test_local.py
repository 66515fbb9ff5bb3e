"""Real torchrun, tiny jobs: success, crashes, hangs, reuse, packing."""

import json
import os
import re
import subprocess
import time
from dataclasses import replace

import psutil
import pytest
from launch_jobs import plan_of, tiny_job

from converge_harness import launch
from converge_harness.errors import ConfigError, StoreError, ToolchainError
from converge_harness.launch import RunOptions, run_plan
from converge_harness.launch.local.agents import free_share, shares_of_nodes
from converge_harness.launch.local.run import Agent, RunningCall
from converge_harness.launch.private_folder import LOCK
from converge_harness.model import Recovery, RestartOwner, Role, RunStatus
from converge_harness.run_folder.layout import GPU_OF_RANK
from converge_harness.trainers.command import trained_by
from converge_harness.trainers.command.settings import Command

pytestmark = pytest.mark.timeout(300)


def run(plan, store, options):
    events = []
    records = run_plan(plan, store, options, events.append)
    assert not left_in(store)
    return records, events


def left_in(store):
    """Processes that work in one of the store's folders."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(store.root)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kinds(events, job=None):
    return [
        type(event).__name__
        for event in events
        if not isinstance(event, launch.Overview) and (job is None or event.job == job)
    ]


def test_what_a_killed_harness_left_goes_though_nothing_is_left_to_run(
    warm_tiny, store, cold, tmp_path, monkeypatch
):
    """It was killed after its last job."""
    plan = plan_of(warm_tiny("one rank", steps=2))
    run(plan, store, cold)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "converge-left"
    left.mkdir()
    (left / LOCK).touch()
    (record,), _ = run(plan, store, cold)
    assert record.reused
    assert not left.exists()


def test_finished_job_is_reused_without_a_process(warm_tiny, store, cold, monkeypatch):
    job = warm_tiny("two ranks", steps=3)
    (record,), events = run(plan_of(job), store, cold)
    assert record.status is RunStatus.FINISHED
    assert kinds(events, job) == ["Queued", "Started", *["Step"] * 3, "Ended"]
    steps = [event for event in events if isinstance(event, launch.Step)]
    assert [(event.step, event.loss) for event in steps] == [(1, 2.0), (2, 1.0), (3, 2 / 3)]
    kept = json.loads((record.folder / "record.json").read_text())
    assert kept["job"]["name"] == "two ranks"
    assert kept["environment"]["OMP_NUM_THREADS"] == "1"

    def refuse(*_arguments, **_options):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    began = time.monotonic()
    records, _ = run(plan_of(*[job] * 15), store, replace(cold, warm=True, check=True))
    assert time.monotonic() - began < 1.0
    assert records == (replace(record, reused=True),) * 15


def warnings_of(events):
    return [event.message for event in events if isinstance(event, launch.Notice)]


def test_a_run_whose_evidence_was_changed_runs_again(warm_tiny, store, cold):
    job = warm_tiny("tampered", steps=2)
    (record,), _ = run(plan_of(job), store, cold)
    metrics = record.folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("2.0", "2.5"))
    (again,), events = run(plan_of(job), store, cold)
    (warning,) = warnings_of(events)
    assert warning.startswith("tampered runs again: metrics.jsonl was changed")
    assert not again.reused
    assert '"loss": 1.0' in metrics.read_text()
    assert run(plan_of(job), store, cold)[0][0].reused


@pytest.mark.slow
def test_a_run_whose_code_changed_runs_again(tiny, store, cold, tmp_path, monkeypatch):
    module = tmp_path / "my_override.py"
    module.write_text("SCALE = 1.0\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    job = tiny("override", steps=1, imports="my_override")
    (record,), _ = run(plan_of(job), store, cold)
    assert str(module) in record.sources
    assert run(plan_of(job), store, cold)[0][0].reused
    module.write_text("SCALE = 1.001\n")
    (again,), events = run(plan_of(job), store, cold)
    assert warnings_of(events) == [
        f"override runs again: {module}, which it used, has changed",
    ]
    assert not again.reused
    module.unlink()
    records, events = run(plan_of(tiny("other", steps=1), job), store, cold)
    assert f"override runs again: {module}, which it used, is not there" in warnings_of(events)[0]
    assert records[1].status is RunStatus.CRASHED


def test_fresh_runs_again(warm_tiny, store, cold):
    job = warm_tiny("again", steps=1)
    run(plan_of(job), store, cold)
    (record,), events = run(plan_of(job), store, replace(cold, fresh=True))
    assert not record.reused
    assert "Started" in kinds(events, job)


def test_ranks_see_the_pinned_surroundings(tiny, store, cold, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    (record,), _ = run(plan_of(tiny("env", ranks=1, steps=1)), store, cold)
    seen = json.loads((record.folder / "surroundings.json").read_text())
    assert seen["env"]["RANK"] == "0"
    assert seen["env"]["TORCHINDUCTOR_CACHE_DIR"] == f"{record.folder}/inductor"
    assert seen["cwd"] == str(record.folder)


def test_crash_brings_the_ranks_own_words_and_skips_what_needs_it(tiny, store, cold):
    seed = tiny("seed", ranks=1, role=Role.SEED, mode="crash")
    test = tiny("test", needs=seed.identity)
    records, events = run(plan_of(seed, test), store, cold)
    assert [record.status for record in records] == [RunStatus.CRASHED, RunStatus.SKIPPED]
    assert records[0].error.message == "ValueError: a tiny rank was told to crash"
    assert "in go_wrong" in records[0].error.traceback
    assert "seed" in records[1].error.message
    assert kinds(events, test) == ["Queued", "Ended"]
    assert store.record(seed.identity) == records[0]


def test_jobs_start_from_the_seed_checkpoint(warm_tiny, store, cold):
    seed = warm_tiny("seed", ranks=1, steps=1, role=Role.SEED)
    test = warm_tiny("test", steps=1, needs=seed.identity)
    records, _ = run(plan_of(test, seed), store, cold)
    assert [record.status for record in records] == [RunStatus.FINISHED] * 2
    told = json.loads((records[0].folder / "job.json").read_text())
    assert told["seed_checkpoint"] == str(records[1].folder / "checkpoint" / "step-0")


def test_missing_seed_job_is_an_error_before_anything_starts(tiny, store, cold):
    with pytest.raises(StoreError, match="neither in the plan nor finished"):
        run(plan_of(tiny("test", needs="0" * 64)), store, cold)


def test_killed_rank_is_named_and_not_tried_again(tiny, store, cold):
    job = tiny("killed", mode="kill", at=2)
    (record,), events = run(plan_of(job), store, cold)
    assert record.status is RunStatus.CRASHED
    assert (record.error.rank, record.error.message) == (1, "killed by SIGKILL")
    assert kinds(events, job).count("Started") == 1


@pytest.mark.parametrize(
    ("mode", "starts", "status"),
    [
        ("port once", 2, RunStatus.FINISHED),
        ("port", 2, RunStatus.CRASHED),
    ],
)
def test_fault_of_the_machine_is_tried_once_more(warm_tiny, store, cold, mode, starts, status):
    job = warm_tiny("port", steps=1, mode=mode)
    (record,), events = run(plan_of(job), store, cold)
    assert record.status is status
    assert kinds(events, job).count("Started") == starts
    assert kinds(events, job).count("Retrying") == 1


def test_no_first_step_is_a_hang(warm_tiny, store, cold):
    plan = plan_of(warm_tiny("hang", mode="hang", at=1), startup_timeout_s=4.0)
    (record,), _ = run(plan, store, cold)
    assert record.status is RunStatus.HUNG
    assert "no step finished within 4 s" in record.error.message


def test_no_next_step_is_a_hang_even_of_a_deaf_rank(tiny, store, cold):
    plan = plan_of(tiny("deaf", mode="deaf", at=3), progress_timeout_s=1.5)
    (record,), _ = run(plan, store, cold)
    assert record.status is RunStatus.HUNG
    assert "no step finished for 1.5 s after step 2" in record.error.message
    assert re.search(r"tiny_rank\.py.* in run", record.error.traceback)  # rank 0 waits for rank 1


def test_packing_never_exceeds_the_slots(warm_tiny, store, cold):
    jobs = [warm_tiny(f"job{number}", ranks=1 + number % 2, steps=1) for number in range(5)]
    records, events = run(plan_of(*jobs, cpu_ranks=3), store, cold)
    assert all(record.status is RunStatus.FINISHED for record in records)
    held, most = {}, 0
    for event in events:
        if isinstance(event, launch.Started):
            assert not set(event.slots) & {slot for slots in held.values() for slot in slots}
            held[event.job.name] = event.slots
        elif isinstance(event, launch.Ended):
            del held[event.job.name]
        most = max(most, sum(len(slots) for slots in held.values()))
    assert most == 3


def test_another_harness_with_the_same_job_is_waited_for(warm_tiny, store, cold):
    job = warm_tiny("shared", steps=1)
    (record,), _ = run(plan_of(job), store, cold)
    finished = record.folder / "record.json"
    content = finished.read_bytes()
    finished.unlink()
    theirs = store.lock(job.identity)
    assert theirs.acquire()
    events = []

    def tell(event):
        events.append(event)
        if isinstance(event, launch.RunsElsewhere):
            finished.write_bytes(content)
            theirs.release()

    (taken,) = run_plan(plan_of(job), store, cold, tell)
    assert taken == replace(record, reused=True)
    assert kinds(events, job) == ["Queued", "RunsElsewhere", "Ended"]


def test_unknown_key_is_refused_before_anything_starts(tiny, store, cold):
    good, bad = tiny("good", steps=1), tiny("bad", steps=1, mood="crash")
    with pytest.raises(
        ConfigError, match=r"bad: tiny\.mood: no such key .*did you mean tiny\.mode"
    ):
        run(plan_of(good, bad), store, replace(cold, check=True))
    assert not (store.root / "runs").exists()
    assert store.checked_file(good.identity).is_file()
    assert not store.checked_file(bad.identity).is_file()


def test_toolchain_that_cannot_check_says_why(tiny, store, cold):
    with pytest.raises(ToolchainError, match=r"no_such_module\n(.|\n)*toolchain build"):
        run(plan_of(tiny("job")), store, replace(cold, check=True, rank_module="no_such_module"))


def test_commit_that_lacks_what_ranks_import_is_reported_in_one_line(
    tiny, store, cold, tmp_path, monkeypatch
):
    (tmp_path / "moved.py").write_text("from torchtitan.components.no_such import Loader\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = tiny("job")
    job = replace(job, toolchain=replace(job.toolchain, name="torchtitan-0.3.0@main"))
    with pytest.raises(ToolchainError) as caught:
        run(plan_of(job), store, replace(cold, check=True, rank_module="moved"))
    said = str(caught.value)
    assert "moved too far from torchtitan-0.3.0" in said
    assert "No module named 'torchtitan.components.no_such'" in said
    assert "Traceback" not in said
    assert "build it again" not in said


def test_full_disk_is_an_error_that_keeps_finished_runs(warm_tiny, tmp_path, cold, small_disk):
    store = launch_store(small_disk)
    first, second = warm_tiny("first", steps=1), warm_tiny("second", steps=1)
    (record,), _ = run(plan_of(first), store, cold)
    (small_disk / "ballast").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(StoreError, match="disk is full"):
        run(plan_of(first, second), store, cold)
    assert store.record(first.identity) == record
    (small_disk / "ballast").unlink()
    records, _ = run(plan_of(first, second), store, cold)
    assert [record.reused for record in records] == [True, False]


def launch_store(root):
    from converge_harness.store import Store

    return Store(root / "store")


def test_gpu_jobs_want_gpus(tiny, store):
    with pytest.raises(ConfigError, match="needs 2 GPUs, but there are 1") as caught:
        run(plan_of(tiny("job")), store, RunOptions(gpus=(0,)))
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in str(caught.value)


def test_ranks_that_share_a_gpu_get_its_number(tiny, store, cold):
    """No GPU is used: the ranks write down what they were given."""
    plan = plan_of(tiny("shared", steps=1), tiny("alone", ranks=1, steps=1))
    records, _ = run(plan, store, replace(cold, gpus=(3, 3)))
    shared, alone = [
        json.loads((record.folder / "surroundings.json").read_text())["env"] for record in records
    ]
    assert shared["CUDA_VISIBLE_DEVICES"] == "3"
    assert shared[GPU_OF_RANK] == "3,3"
    assert shared["NCCL_MAX_NCHANNELS"] == "2"
    assert (alone["CUDA_VISIBLE_DEVICES"], alone[GPU_OF_RANK]) == ("3", "3")


def test_the_nodes_of_a_job_divide_its_slots():
    recovery = Recovery((), checkpoint_every=2, restarts=RestartOwner.TORCHRUN, nodes=(1, 2))
    job = tiny_job("nodes", ranks=4)
    two_nodes = replace(job, spec=replace(job.spec, recovery=recovery))
    assert shares_of_nodes(two_nodes, (4, 5, 6, 7)) == ((4, 5), (6, 7))
    assert shares_of_nodes(job, (4, 5, 6, 7)) == ((4, 5, 6, 7),)


def test_a_node_that_joins_takes_the_slots_of_the_one_that_was_lost(tmp_path):
    first, second = (Agent(None, tmp_path, tmp_path, slots) for slots in ((4, 5), (6, 7)))
    shares = ((4, 5), (6, 7))
    assert free_share(shares, [first]) == (6, 7)
    second.lost = True
    assert free_share(shares, [first, second]) == (6, 7)
    first.lost, second.lost = True, False
    assert free_share(shares, [first, second]) == (4, 5)
    shared = ((0,), (1,), (0,), (1,))
    four = [Agent(None, tmp_path, tmp_path, share) for share in shared]
    four[0].lost = True
    assert free_share(shared, four) == (0,)


def test_nodes_of_a_script_are_counted_among_those_that_are_left(tmp_path):
    agents = [Agent(None, tmp_path, tmp_path) for _ in range(3)]
    call = RunningCall(None, (), None, agents)
    assert call.node(1) is agents[1]
    agents[1].lost = True
    assert call.node(1) is agents[2]
    agents[2].lost = True
    assert call.node(1) is None
    agents.append(Agent(None, tmp_path, tmp_path))  # a node that joins
    assert call.node(1) is agents[3]


def test_a_program_that_chooses_its_gpus_cannot_share_one(tiny, store, tmp_path):
    job = tiny("command")
    command = replace(job.spec, trainer=trained_by(Command(("train.py",), tmp_path)))
    with pytest.raises(ConfigError, match="chooses a GPU per rank by itself") as caught:
        run(plan_of(replace(job, spec=command)), store, RunOptions(gpus=(0, 0)))
    assert "unset the variable" in str(caught.value)
    with pytest.raises(ConfigError, match="needs 2 GPUs") as caught:
        run(plan_of(replace(job, spec=command)), store, RunOptions(gpus=(0,)))
    assert "MULTI_RANK" not in str(caught.value)
