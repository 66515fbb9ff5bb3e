"""Ranks that wait after a step; real runs: ``tests/e2e/test_stopped_sets.py``."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from converge_harness.rank.waiting import wait_after, wait_between_steps
from converge_harness.run_folder.waits import read_waits, wait_file, waits_document


@pytest.fixture
def say(tmp_path):
    """Says after which steps to wait, as the harness does: the file is replaced as a whole."""

    def write(*steps):
        part = tmp_path / "wait.json.part"
        part.write_text(json.dumps(waits_document(steps)))
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
    checkpointer = SimpleNamespace(save=lambda step, last_step=False: saved.append(step))
    trainer = SimpleNamespace(checkpointer=checkpointer)
    unwrapped = checkpointer.save
    wait_between_steps(trainer, tmp_path)
    assert checkpointer.save is unwrapped  # nothing to wait for

    say(1)
    wait_between_steps(trainer, tmp_path)
    thread = threading.Thread(target=lambda: checkpointer.save(1, last_step=True), daemon=True)
    thread.start()
    assert stays_at(saved, [1])
    assert thread.is_alive()
    say()
    thread.join(10)
    assert not thread.is_alive()
