"""Ranks that wait after a step; real runs: ``tests/e2e/test_stopped_sets.py``."""

import json
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from converge_harness.rank.titan.common.checkpoints import checkpoint_settings, watch_checkpoints
from converge_harness.rank.waiting import wait_after, wait_between_steps
from converge_harness.run_folder.job import BaseConfig, Degrees, RankJob
from converge_harness.run_folder.passes import claim_pass
from converge_harness.run_folder.waits import (
    read_waits,
    wait_file,
    waits_document,
    with_saves_before_waits,
)


@pytest.fixture
def say(tmp_path):
    """Says after which steps to wait, as converge does: the file is replaced as a whole."""

    def write(*steps, saves=()):
        part = tmp_path / "wait.json.part"
        part.write_text(json.dumps(waits_document(steps, saves=saves)))
        part.replace(wait_file(tmp_path))

    return write


def after_steps(folder, *steps):
    """Steps that have been waited after, as they end, and the thread that waits."""
    ended = []

    def train():
        for step in steps:
            wait_after(folder, step)
            ended.append(step)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    return ended, thread


def test_a_run_that_nobody_told_to_wait_does_not(tmp_path, say):
    assert read_waits(tmp_path) == frozenset()
    ended, thread = after_steps(tmp_path, 1, 2)
    thread.join(10)
    assert ended == [1, 2]
    say(7)
    ended, thread = after_steps(tmp_path, 6, 8)  # as one that continues after that step
    thread.join(10)
    assert ended == [6, 8]


def stays_at(found, expected):
    """Whether a thread gets so far, however late, and then no further."""
    deadline = time.monotonic() + 30
    while found != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    return found == expected


def test_a_rank_waits_until_its_step_is_no_longer_named(tmp_path, say):
    say(4, 2)
    ended, thread = after_steps(tmp_path, 1, 2, 3, 4)
    assert stays_at(ended, [1])
    say(4)
    assert stays_at(ended, [1, 2, 3])
    say()
    thread.join(10)
    assert ended == [1, 2, 3, 4]


def test_a_trainer_waits_once_its_checkpoint_is_complete(tmp_path, say):
    saved = []
    trainer = SimpleNamespace(step=0, should_continue_training=lambda: trainer.step < 3)
    unwrapped = trainer.should_continue_training
    wait_between_steps(trainer, tmp_path)
    assert trainer.should_continue_training is unwrapped  # nothing to wait for

    say(1, 3)  # its last step is no matter
    wait_between_steps(trainer, tmp_path)

    def train():  # as torchtitan does
        while trainer.should_continue_training():
            trainer.step += 1
            saved.append(trainer.step)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert stays_at(saved, [1])
    assert thread.is_alive()
    say()
    thread.join(10)
    assert saved == [1, 2, 3]


def test_a_trainer_waits_where_it_was_interrupted(tmp_path, say):
    say(64)
    trainer = SimpleNamespace(step=64, should_continue_training=lambda: True)  # it has been loaded
    wait_between_steps(trainer, tmp_path)
    thread = threading.Thread(target=trainer.should_continue_training, daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    say()
    thread.join(10)
    assert not thread.is_alive()


def job_in(folder, **values):
    return RankJob(
        "x", "test", "id", "titan_0_3", folder, 1, 100, Degrees(), BaseConfig("x"), **values
    )


def test_a_rank_that_is_told_to_saves_before_it_waits(tmp_path, say):
    job = with_saves_before_waits(job_in(tmp_path))
    assert job == job_in(tmp_path)
    say(25, 50)
    assert with_saves_before_waits(job_in(tmp_path)) == job_in(tmp_path)
    say(16, 25, 50, 100, saves=(25, 50, 100))
    job = with_saves_before_waits(job_in(tmp_path))
    assert job.resumes
    assert job.may_continue
    assert [step for step in range(1, 101) if job.saves_at(step)] == [25, 50]  # never the last
    often = with_saves_before_waits(job_in(tmp_path, checkpoint_every=40))
    assert [step for step in range(1, 101) if often.saves_at(step)] == [25, 40, 50, 80]
    settings = dict(checkpoint_settings(job))
    assert settings["checkpoint.interval"] == 1  # it has to be asked at every step
    # Let train on, or begun again where nobody waits: it continues from what it has saved.
    wait_file(tmp_path).unlink()
    claim_pass(tmp_path)
    again = with_saves_before_waits(job_in(tmp_path))
    assert again.resumes
    assert not any(map(again.saves_at, range(1, 101)))


def test_a_rank_ends_and_waits_only_once_its_checkpoint_is_written(tmp_path):
    """Real writes in the background: ``tests/e2e/test_resumed_runs.py``."""
    job = job_in(tmp_path, checkpoint_every=50, saves_after=frozenset({98}))
    writing = Future()
    checkpointer = SimpleNamespace(save=None, dcp_load=None, save_future=writing)
    trainer = SimpleNamespace(checkpointer=checkpointer, should_continue_training=None)
    watch_checkpoints(trainer, job, recorder=None)
    assert checkpointer.save(99) is False  # trains on beside it

    last = threading.Thread(target=checkpointer.save, args=(100, True), daemon=True)
    last.start()
    last.join(0.5)
    assert last.is_alive()
    writing.set_result(None)
    last.join(10)
    assert not last.is_alive()

    checkpointer.save_future = Future()
    checkpointer.save_future.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        checkpointer.save(100, last_step=True)
