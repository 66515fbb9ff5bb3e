"""The warm server and its stubs: a fork behaves as the program that it stands for."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from launch_jobs import plan_of

from converge_harness import launch
from converge_harness.launch import RunOptions, run_plan
from converge_harness.launch.warm import SERVER_GONE, STUB, ServerState, start_server
from converge_harness.model import RunStatus
from converge_harness.rank.start.stub import EXIT_CODE, LENGTH
from converge_harness.trainers import Resources, environment

pytestmark = pytest.mark.timeout(300)
HERE = Path(__file__).parent


@contextmanager
def server_of(toolchain, *arguments):
    """A server that imports next to nothing, ready or failed."""
    paths = f"{HERE.parents[1] / 'src'}{os.pathsep}{HERE}"
    wanted = environment({**os.environ, "PYTHONPATH": paths}, Resources())
    made = start_server(toolchain.python, arguments, wanted, module="tiny_server")
    try:
        while made.state() is ServerState.STARTING:
            time.sleep(0.05)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def server(toolchain):
    with server_of(toolchain) as made:
        assert made.state() is ServerState.READY, made.complaint()
        yield made


def call(server, *arguments, **options):
    command = [server.python, "-u", "-m", "tiny_program", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_program_gets_arguments_streams_environment_and_folder(server, tmp_path):
    told = call(server, "show", "a b", "ü", input="from stdin", cwd=tmp_path, env={"ONLY": "this"})
    assert told.returncode == 0, told.stderr
    seen = json.loads(told.stdout)
    assert seen["argv"] == ["show", "a b", "ü"]
    assert seen["stdin"] == "from stdin"
    assert seen["cwd"] == seen["path"] == str(tmp_path)
    assert seen["environment"]["ONLY"] == "this"
    assert "HOME" not in seen["environment"]
    assert told.stderr == "to stderr\n"


@pytest.mark.parametrize("code", [0, 3])
def test_exit_code_comes_back(server, code):
    assert call(server, "exit", str(code)).returncode == code


def test_exception_is_printed(server):
    told = call(server, "raise")
    assert told.returncode == 1
    assert "ValueError: as told" in told.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal_comes_back(server, number):
    assert call(server, "die", str(int(number))).returncode == -number


def start(server, *arguments):
    command = [server.python, "-m", "tiny_program", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, psutil.Process(int(process.stdout.readline()))


def test_signals_are_handed_on(server):
    process, child = start(server, "catch")
    process.terminate()
    assert process.stdout.read() == "caught\n"
    assert process.wait(10) == 5
    psutil.wait_procs([child], timeout=10)
    process.stdout.close()


def until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_exit_code_comes_back_though_a_signal_comes_after_it(tmp_path):
    """As torchrun's SIGTERM to a rank that has just been killed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        stub = subprocess.Popen([sys.executable, "-I", "-S", STUB, tmp_path / "s", "-m", "any"])
        connection, _ = listener.accept()
    with connection:
        head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        for stream in streams:
            os.close(stream)
        connection.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
        status = Path(f"/proc/{stub.pid}/status")
        caught = re.compile(r"SigCgt:\s*(\w+)")
        handled = 1 << (signal.SIGTERM - 1)
        until(lambda: int(caught.search(status.read_text())[1], 16) & handled)
        stub.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(stub.pid).status() == psutil.STATUS_STOPPED)
        connection.sendall(EXIT_CODE.pack(-signal.SIGKILL))
    stub.terminate()
    stub.send_signal(signal.SIGCONT)
    assert stub.wait(20) == -signal.SIGKILL


def test_child_dies_with_its_stub(server):
    process, child = start(server, "sleep")
    process.kill()
    process.wait(10)
    assert not psutil.wait_procs([child], timeout=10)[1]
    process.stdout.close()


def test_children_die_with_the_server(toolchain):
    with server_of(toolchain) as server:
        process, child = start(server, "sleep")
        psutil.Process(child.ppid()).kill()
        assert not psutil.wait_procs([child], timeout=10)[1]
        assert process.wait(10) == SERVER_GONE
        assert server.state() is ServerState.FAILED
        process.stdout.close()


def test_many_at_once(server):
    processes = [
        subprocess.Popen([server.python, "-m", "tiny_program", "exit", str(number)])
        for number in range(30)
    ]
    assert [process.wait(60) for process in processes] == list(range(30))


def test_leftover_threads_refuse_the_fork(toolchain):
    with server_of(toolchain, "--thread") as server:
        assert server.state() is ServerState.FAILED
        assert "threads after the imports" in server.complaint()


def test_matrix_by_warm_start(tiny, store):
    options = RunOptions(rank_module="tiny_rank", grace_s=2.0)
    events = []
    jobs = [tiny("good", steps=2), tiny("bad", mode="crash"), tiny("killed", mode="kill", at=2)]
    records = run_plan(plan_of(*jobs), store, options, events.append)
    assert [record.status for record in records] == [
        RunStatus.FINISHED,
        RunStatus.CRASHED,
        RunStatus.CRASHED,
    ]
    assert records[1].error.message == "ValueError: a tiny rank was told to crash"
    assert (records[2].error.rank, records[2].error.message) == (1, "killed by SIGKILL")
    assert not [event for event in events if isinstance(event, launch.Notice)]
    assert json.loads((records[0].folder / "record.json").read_text())["warm"] is True


@pytest.mark.slow
def test_server_that_dies_costs_one_try(tiny, store):
    """Its jobs start once more, cold."""
    options = RunOptions(rank_module="tiny_rank", check=False, grace_s=2.0)
    job = tiny("job", steps=2, seconds=0.1)
    events = []

    def tell(event):
        events.append(event)
        if isinstance(event, launch.Started) and event.attempt == 1:
            for process in psutil.Process().children():
                if "converge_harness.rank.start.warm" in process.cmdline():
                    process.kill()

    (record,) = run_plan(plan_of(job), store, options, tell)
    assert record.status is RunStatus.FINISHED
    assert [event for event in events if isinstance(event, launch.Retrying)]
    assert [event for event in events if isinstance(event, launch.Notice)]
    assert json.loads((record.folder / "record.json").read_text())["warm"] is False
