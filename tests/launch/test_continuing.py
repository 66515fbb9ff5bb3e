"""Runs that were interrupted by nobody's plan and continue from a checkpoint; real torchtitan:
``tests/e2e/test_continued_runs.py``.
"""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from launch_jobs import plan_of, tiny_job

from converge_harness import launch
from converge_harness.launch import run_plan
from converge_harness.launch.continuing import continues_from
from converge_harness.launch.next_call import calls_again
from converge_harness.model import Recovery, RestartOwner, RunStatus
from converge_harness.run_folder.checkpoints import write_manifest
from converge_harness.run_folder.passes import pass_folder

pytestmark = pytest.mark.timeout(300)
EVERY = 4


class EnoughError(Exception):
    """Ends a plan from its observer, as Ctrl-C does."""


@pytest.fixture
def options(cold):
    return replace(cold, rank_module="tiny_passes")


@pytest.fixture
def job(warm_tiny):
    return with_checkpoints(warm_tiny("long", ranks=2, steps=12, seconds=0.05))


def with_checkpoints(job):
    recovery = Recovery((), EVERY, RestartOwner.USER, max_restarts=0)
    return replace(job, spec=replace(job.spec, recovery=recovery))


@contextmanager
def held_after(step, job, store):
    """No run of the store trains further, so that it cannot end before it is interrupted."""
    told = store.run_folder(job.name, job.identity).parent / "hold-after"
    told.parent.mkdir(parents=True, exist_ok=True)
    told.write_text(str(step))
    yield
    told.unlink()


def run(job, store, options, *, until=None):
    """The record, the steps that were trained, and what was said; ends after a step."""
    steps, said = [], []

    def note(event):
        if isinstance(event, launch.Step):
            steps.append(event.step)
            if event.step == until:
                raise EnoughError
        if isinstance(event, launch.GoingOn):
            said.append(event.reason)

    if until is not None:
        with held_after(until, job, store), pytest.raises(EnoughError):
            run_plan(plan_of(job), store, options, note)
        return None, steps, said
    (record,) = run_plan(plan_of(job), store, options, note)
    return record, steps, said


def test_an_interrupted_run_continues_from_its_newest_checkpoint(job, store, options):
    _, steps, said = run(job, store, options, until=10)
    assert (steps[:10], said) == ([*range(1, 11)], [])
    record, steps, said = run(job, store, options)
    assert (steps, said) == ([9, 10, 11, 12], ["from its checkpoint of step 8"])
    assert record.status is RunStatus.FINISHED
    assert [each.name for each in sorted(record.folder.glob("passes/*"))] == ["001", "002"]
    # What failed in one start is not taken for a failure of the next.
    assert {each.name for each in record.folder.glob("logs/call-*")} == {"call-01", "call-02"}
    assert not (record.folder / "checkpoint").exists()  # nothing continues from it any more
    again, steps, _ = run(job, store, options)
    assert (again.reused, steps) == (True, [])


@pytest.mark.parametrize(
    ("drew", "asked", "step"),
    [("", False, 64), ("a1b2", False, None), ("a1b2", True, 64)],
    ids=["draws nothing", "draws", "draws, with checkpoint_every"],
)
def test_a_run_that_only_waited_starts_over_if_it_draws_random_numbers(store, drew, asked, step):
    job = tiny_job("waited", steps=100)
    job = with_checkpoints(job) if asked else job
    folder, payload = store.run_folder(job.name, job.identity), {"seed": 1}
    store.start_run(folder, payload)
    of_pass, checkpoint = pass_folder(folder, 1), folder / "checkpoint" / "step-64"
    (of_pass / "state").mkdir(parents=True)
    (of_pass / "state" / "saved-step-00000064.npz").touch()
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_text("0")
    write_manifest(checkpoint, 64, of_pass)
    lines = [{"kind": "step", "step": each, "random_state": drew} for each in (63, 64)]
    (of_pass / "metrics.jsonl.part").write_text("".join(json.dumps(x) + "\n" for x in lines))
    assert continues_from(store, job, folder, payload) == step


def test_it_starts_over_if_asked_to_or_if_what_it_was_made_from_has_changed(job, store, options):
    run(job, store, options, until=6)
    _, steps, said = run(job, store, replace(options, fresh=True), until=6)
    assert (steps[0], said) == (1, [])
    path = store.run_folder(job.name, job.identity) / "job.json"
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 2'))
    _, steps, said = run(job, store, options, until=6)
    assert (steps[0], said) == (1, [])
    # A file that it imported is not what it was.
    mine = store.root / "mine.py"
    mine.write_text("changed")
    imported = path.parent / "imported"
    imported.mkdir()
    (imported / "1.json").write_text(json.dumps({"files": {str(mine): "0" * 64}}))
    record, steps, said = run(job, store, options)
    assert (steps, said) == ([*range(1, 13)], [])
    assert record.status is RunStatus.FINISHED


def test_it_starts_over_before_its_first_checkpoint_and_never_from_a_torn_one(job, store, options):
    run(job, store, options, until=3)
    _, steps, said = run(job, store, options, until=9)
    assert (steps[0], said) == (1, [])
    folder = store.run_folder(job.name, job.identity)
    (folder / "checkpoint" / "step-8" / "shard").write_bytes(b"")
    (folder / "checkpoint" / "step-8" / ".metadata").unlink()  # which the tiny ranks go by
    _, steps, said = run(job, store, options)
    assert (steps[0], said) == (5, ["from its checkpoint of step 4"])


def test_a_crash_is_reported_as_any_other_and_continues_too(warm_tiny, store, options):
    job = with_checkpoints(warm_tiny("wrong", ranks=2, steps=12, mode="crash", at=6))
    assert not calls_again(job)
    record, steps, _ = run(job, store, options)
    assert (record.status, steps) == (RunStatus.CRASHED, [*range(1, 6)])
    assert record.error.message.endswith("a tiny rank was told to crash")
    record, steps, said = run(job, store, options)
    assert (record.status, steps) == (RunStatus.CRASHED, [5])
    assert said == ["from its checkpoint of step 4"]


def test_a_stopped_run_continues_once_all_of_its_steps_are_wanted(job, store, options):
    job = replace(job, steps=32)
    plan = plan_of(job, stop_after=10)

    def settled(job, records, training):
        return "it was settled"

    with held_after(12, job, store):
        (record,) = run_plan(plan, store, replace(options, look=settled), lambda event: None)
    assert record.status is RunStatus.STOPPED
    (same,) = run_plan(plan, store, replace(options, look=settled), lambda event: None)
    assert same.reused
    record, steps, said = run(job, store, options)
    assert record.status is RunStatus.FINISHED
    assert steps[0] > EVERY
    assert said == [f"from its checkpoint of step {steps[0] - 1}"]
