"""A harness that is stopped in the middle, by all means: no process is left, nothing is lost."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from harness_processes import harness_processes, read_until
from launch_jobs import plan_of

from converge_harness.launch import run_plan
from converge_harness.model import RunStatus

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent


@pytest.fixture
def harness(tiny, toolchain, store):
    """Starts a real harness process; ends it if the test has not."""
    program = HERE / "tiny_harness.py"
    with harness_processes(program, store.root, toolchain.python) as start:
        yield start


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


QUICK = {("cold", signal.SIGKILL), ("warm", signal.SIGTERM), ("nodes", signal.SIGINT)}
"""Every start once, and every signal; only .ci/run waits for the other pairs."""


@pytest.mark.parametrize(
    ("how", "number"),
    [
        pytest.param(how, number, marks=() if (how, number) in QUICK else pytest.mark.slow)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        for how in ("cold", "warm", "nodes")
    ],
)
def test_no_process_outlives_the_harness(harness, store, how, number):
    process = harness(how, "long:2:1000:0.2")
    read_until(process, "Step long 2")
    processes = family(process)
    assert len(processes) >= 3  # torchrun's agent and two ranks, at least
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


@pytest.mark.slow
def test_interrupted_matrix_goes_on_where_it_was(harness, tiny, store, cold):
    process = harness("cold", "short:1:1:0.0", "long:2:60:0.2")
    read_until(process, "Ended short")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    short, long = tiny("short", ranks=1, steps=1, seconds=0.0), tiny("long", steps=60, seconds=0.2)
    assert store.record(short.identity).status is RunStatus.FINISHED
    assert store.record(long.identity) is None
    records = run_plan(plan_of(short, long), store, cold, lambda event: None)
    assert [record.status for record in records] == [RunStatus.FINISHED] * 2
    assert [record.reused for record in records] == [True, False]


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
