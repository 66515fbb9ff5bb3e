"""A harness that is stopped in the middle, by all means: no process is left, nothing is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_jobs import plan_of

from harness.launch import run_plan
from harness.model import RunStatus

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent


@pytest.fixture
def harness(tiny, toolchain, store):
    """Starts a real harness process; ends it if the test has not."""
    started = []

    def start(how, *jobs):
        process = subprocess.Popen(
            [sys.executable, HERE / "tiny_harness.py", store.root, toolchain.python, how, *jobs],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def read_until(process, wanted):
    for line in process.stdout:
        if line.startswith(wanted):
            return
    pytest.fail(f"the harness ended without {wanted!r}")


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("how", ["cold", "warm"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_harness(harness, store, how, number):
    process = harness(how, "long:2:1000:0.2")
    read_until(process, "Step long 2")
    processes = family(process)
    ranks = [each for each in processes if "metrics.jsonl" not in each.name()]
    assert len(ranks) >= 3  # torchrun's agent and two ranks, at least
    process.send_signal(number)
    code = process.wait(30)
    assert code == (-9 if number == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


@pytest.mark.parametrize("how", ["cold", "warm"])
def test_harness_killed_while_ranks_start(harness, how):
    process = harness(how, "long:2:1000:0.2")
    read_until(process, "Started long")
    time.sleep(0.3)
    processes = family(process)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def test_interrupted_matrix_goes_on_where_it_was(harness, tiny, store, cold):
    process = harness("cold", "first:2:1:0.0", "second:2:100:0.2")
    # Large and long jobs go first, so the long one is interrupted only once the short one is done.
    read_until(process, "Step second 1")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process = harness("cold", "first:2:1:0.0")
    read_until(process, "Ended first")
    process.wait(30)
    first = tiny("first", steps=1, seconds=0.0)
    second = tiny("second", steps=100, seconds=0.2)
    assert store.record(first.identity).status is RunStatus.FINISHED
    assert store.record(second.identity) is None
    assert (store.run_folder("second", second.identity) / "job.json").is_file()
    records = run_plan(plan_of(first), store, cold, lambda event: None)
    assert [record.reused for record in records] == [True]


def test_observer_that_fails_leaves_no_process(tiny, store, cold):
    before = set(psutil.Process().children(recursive=True))

    def fail(event):
        if type(event).__name__ == "Step":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_plan(plan_of(tiny("long", steps=1000, seconds=0.2)), store, cold, fail)
    assert set(psutil.Process().children(recursive=True)) == before


def test_signal_handlers_are_put_back(tiny, store, cold):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run_plan(plan_of(tiny("one", ranks=1, steps=1)), store, cold, lambda event: None)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert os.getpid()
