"""The end of a probed program waits for threads that still run."""

import hashlib
import threading

import pytest

from converge_harness.probe import leaving

pytestmark = pytest.mark.skipif(not leaving._TASKS.is_dir(), reason="there is no /proc")


def test_the_end_waits_for_a_thread_that_runs_and_for_none_that_waits():
    over, begun, waits = threading.Event(), threading.Event(), threading.Event()

    def run():
        block = bytes(1 << 24)
        while not over.is_set():
            hashlib.sha256(block)  # outside of the interpreter's lock, as gloo's threads
            begun.set()
        waits.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    timer = threading.Timer(0.3, over.set)
    timer.start()
    leaving._wait_until_idle(None)
    assert over.is_set()
    assert thread.is_alive()
    waits.set()
    thread.join()


def test_the_end_waits_for_no_thread_that_never_rests(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(leaving, "_LONGEST_S", 0.05)
    thread = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)], daemon=True)
    thread.start()
    leaving._wait_until_idle(None)
    assert thread.is_alive()
    over.set()
    thread.join()
