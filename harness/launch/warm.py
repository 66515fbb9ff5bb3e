"""Warm start: per toolchain a server (``rank.start.warm``) that forks ranks, imports done.

A job uses it through a replacement for the toolchain's ``python``: an executable that runs its
program as a fork of the server. torchrun starts its ranks with it as well (``PYTHON_EXEC``).
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from converge_harness.launch import processes
from converge_harness.launch.private_folder import private_folder
from converge_harness.model import Toolchain
from converge_harness.trainers import searching
from converge_harness.trainers.failure import log_tail

STUB = Path(__file__).parent.parent / "rank" / "start" / "stub.py"
SERVER_MODULE = "converge_harness.rank.start.warm"
SERVER_GONE = 70
"""Exit code of a stub whose server is not there (``converge_harness.rank.start.stub``)."""
START_TIMEOUT_S = 120.0


class ServerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class WarmServer:
    """One toolchain's server, from start to close."""

    python: Path
    """The replacement for the toolchain's Python; usable once the server is ready."""
    _process: subprocess.Popen[bytes]
    _folder: Path
    """Private, because anyone who can reach its socket can run programs as this user."""
    _owned: ExitStack
    """Removes the folder."""
    _deadline: float
    _ready: bool = False

    def state(self) -> ServerState:
        """Its current state; does not block."""
        if self._process.poll() is not None:
            return ServerState.FAILED
        if not self._ready:
            self._ready = self._answers()
        if self._ready:
            return ServerState.READY
        late = time.monotonic() > self._deadline
        return ServerState.FAILED if late else ServerState.STARTING

    def complaint(self) -> str:
        """The last line of a failed server's log."""
        lines = log_tail(self._folder / "server.log").splitlines()
        return lines[-1] if lines else f"no answer within {START_TIMEOUT_S:.0f} s"

    def close(self) -> None:
        """End the server, and with it every process that it forked."""
        self._process.kill()
        self._process.wait()
        self._owned.close()

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(self._folder / "socket"))
            except (FileNotFoundError, ConnectionRefusedError):
                return False
        return True


def start_server(
    python: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    module: str = SERVER_MODULE,
) -> WarmServer:
    """Start a toolchain's server, which imports in the background.

    ``arguments`` are those of ``converge_harness.rank.start.warm`` but for the socket.
    Raises OSError when the toolchain's Python cannot be started.
    """
    with ExitStack() as owned:
        folder = owned.enter_context(private_folder())
        address = folder / "socket"
        stand_in = folder / "python"
        command = shlex.join([str(python), "-I", "-S", str(STUB), str(address)])
        stand_in.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        stand_in.chmod(0o700)
        argv = [str(python), "-m", module, *arguments, "--socket", str(address)]
        process = processes.start(argv, environment, folder, folder / "server.log")
        deadline = time.monotonic() + START_TIMEOUT_S
        return WarmServer(stand_in, process, folder, owned.pop_all(), deadline)


class WarmServers:
    """The servers of a matrix, started on first use and ended when no longer needed."""

    def __init__(self, environment: Mapping[str, str], device: str) -> None:
        self._environment = environment
        self._device = device
        self._servers: dict[str, WarmServer] = {}
        self._failed: dict[str, str] = {}

    def want(self, toolchain: Toolchain) -> None:
        """Start a toolchain's server unless it runs or has failed."""
        name = toolchain.name
        if name in self._servers or name in self._failed:
            return
        arguments = ("--dialect", toolchain.dialect, "--device", self._device)
        variables = searching(toolchain, self._environment)
        self._servers[name] = start_server(toolchain.python, arguments, variables)

    def starting(self, toolchain: str) -> bool:
        """Whether the server is neither ready nor failed yet."""
        return self._state(toolchain) is ServerState.STARTING

    def python(self, toolchain: str) -> Path | None:
        """The replacement for the toolchain's Python; None: start cold."""
        if self._state(toolchain) is ServerState.READY:
            return self._servers[toolchain].python
        return None

    def take_failures(self) -> dict[str, str]:
        """Toolchains whose server failed since the last call, with its error."""
        failures = {
            name: server.complaint()
            for name, server in self._servers.items()
            if server.state() is ServerState.FAILED
        }
        for name in failures:
            self._servers.pop(name).close()
        self._failed |= failures
        return failures

    def keep_only(self, toolchains: set[str]) -> None:
        """End the servers of all other toolchains, to free their memory."""
        for name in set(self._servers) - toolchains:
            self._servers.pop(name).close()

    def close(self) -> None:
        self.keep_only(set())

    def _state(self, toolchain: str) -> ServerState | None:
        server = self._servers.get(toolchain)
        return server.state() if server else None
