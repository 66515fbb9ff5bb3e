"""A stand-in for this Python whose programs are forks of one warm server, for tests of many jobs.

Importing torch and torchtitan costs more than the few steps that a test trains. The numbers are
those of cold starts, bit for bit (``tests/launch/test_warm_numbers.py``).
"""

import atexit
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STUB = Path(__file__).parents[2] / "harness" / "rank" / "start" / "stub.py"
AGENT = "converge_harness.rank.start.agent"
"""torchrun's agent in a form that a fork can run; its arguments are torchrun's."""
TIMEOUT_S = 300


def lasting_folder():
    """A new folder that is there until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="converge-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def warm_python(dialect):
    """The stand-in for a dialect's ranks; its server lives as long as these tests."""
    folder = lasting_folder()
    address, log = folder / "socket", folder / "server.log"
    arguments = ("--dialect", dialect, "--device", "cpu", "--socket", str(address))
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "converge_harness.rank.start.warm", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CONVERGE_PARENT": str(os.getpid())},
            stdout=stream,
            stderr=stream,
        )
    atexit.register(server.wait)
    atexit.register(server.kill)  # called first
    python = folder / "python"
    command = shlex.join([sys.executable, "-I", "-S", str(STUB), str(address)])
    python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    python.chmod(0o700)
    deadline = time.monotonic() + TIMEOUT_S
    while not _answers(address):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return str(python)


def torchrun(dialect, ranks, arguments, *, folder, max_restarts=0):
    """Run ``python -m converge_harness.rank ARGUMENTS``; returns the finished process."""
    python = warm_python(dialect)
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # as in every job
        "PYTHON_EXEC": python,  # what torchrun starts its ranks with
        "CONVERGE_PARENT": str(os.getpid()),
    }
    if max_restarts:  # restarts in place race for the shared store (torch 2.13)
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return subprocess.run(
        [
            *(python, "-m", AGENT, "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--local-addr", "127.0.0.1", "--max-restarts", str(max_restarts)),
            *("-m", "converge_harness.rank", *map(str, arguments)),
        ],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def _answers(address):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True
