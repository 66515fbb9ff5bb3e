"""Ranks by fork: ``python -m converge_harness.rank.start.warm --dialect D --device cpu …``.

Importing torch and torchtitan takes seconds of CPU per rank. This server imports them once and
forks: every request of a ``stub.py`` becomes a child that runs one module (torchrun's agent, or a
rank) with the stub's standard streams, environment and working directory.

What ends with what: the server with converge, every child with the server (both by the kernel's
parent-death signal), a child with its stub (the server sees the connection close), and a stub with
the agent that started it.

Listening on the socket means ready. The server has one thread and waits in one place, so a fork
cannot copy a lock that another thread holds.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from converge_harness.rank.recorder.imported import resolve_imported
from converge_harness.rank.start import entry
from converge_harness.rank.start.parent import die_with_parent
from converge_harness.rank.start.stub import EXIT_CODE, LENGTH
from converge_harness.run_folder.layout import PARENT_VARIABLE

FORK_SAFE_THREADS = frozenset({"jemalloc_bg_thd"})
"""pyarrow's allocator stops and restarts this one around a fork (pthread_atfork)."""
_REQUEST_TIMEOUT_S = 10.0


class NotForkableError(Exception):
    """The imports left threads behind, whose locks a fork would copy in an unknown state."""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What one stub asks for."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m converge_harness.rank.start.warm")
    parser.add_argument("--dialect", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--socket", required=True, type=Path)
    options = parser.parse_args(arguments)
    serve(options.socket, lambda: entry.preload(options.dialect, options.device))


def serve(address: Path, preload: Callable[[], object]) -> NoReturn:
    """Import, then fork for every stub that connects, until killed.

    Raises NotForkableError when the imports started threads.
    """
    die_with_parent()
    before = dict(os.environ)
    preload()
    importlib.import_module("torch.distributed.run")  # what the agent needs

    resolve_imported()
    require_forkable()
    leave_imports_at_exit()
    set_by_imports = {
        name: value for name, value in os.environ.items() if before.get(name) != value
    }
    Server(address, set_by_imports).serve()


def require_forkable() -> None:
    """Raise NotForkableError when a thread runs that a fork would break."""
    names = {
        task.joinpath("comm").read_text().strip()
        for task in Path("/proc/self/task").iterdir()
        if task.name != str(os.getpid())
    }
    if names - FORK_SAFE_THREADS:
        raise NotForkableError(f"threads after the imports: {', '.join(sorted(names))}")


def leave_imports_at_exit() -> None:
    """Keep what was imported from being torn down when a child ends.

    torch unregisters every operator of every ``torch.library.Library`` by a finalizer, which takes
    a rank longer than a training step.
    """
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


class Server:
    """Forks a child per connection and sends each its child's exit code."""

    def __init__(self, address: Path, set_by_imports: Mapping[str, str]) -> None:
        self._set_by_imports = set_by_imports
        self._selector = selectors.DefaultSelector()
        self._stubs: dict[int, socket.socket] = {}
        """By process id of a running child, the connection of its stub."""
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, _notice)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is converge's to handle
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # children have their own use for it
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(address))
        self._listener.listen(256)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        # What is there now stays: keep the collector from touching, and so copying, its pages.
        gc.collect()
        gc.freeze()

    def serve(self) -> NoReturn:
        """Serve until killed: converge kills the server, or the kernel does."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd == self._wakeup:
                    self._reap()
                else:
                    self._hand_on(key.data)

    def _accept(self) -> None:
        stub, _ = self._listener.accept()
        stub.settimeout(_REQUEST_TIMEOUT_S)
        try:
            request, streams = receive(stub)
        except (OSError, ValueError) as error:  # such as converge asking whether we listen
            print(f"no request: {error}", file=sys.stderr, flush=True)
            stub.close()
            return
        child = os.fork()
        if child == 0:
            self._become(request, streams, stub)
        for stream in streams:
            os.close(stream)
        self._stubs[child] = stub
        self._selector.register(stub, selectors.EVENT_READ, child)

    def _reap(self) -> None:
        """Send exit codes to the stubs of children that ended."""
        os.read(self._wakeup, 4096)
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if child == 0:
                return
            stub = self._stubs.pop(child, None)
            if stub is None:
                continue
            self._selector.unregister(stub)
            code = os.waitstatus_to_exitcode(status)
            try:
                stub.sendall(EXIT_CODE.pack(code))
            except OSError as error:  # the stub is gone, and nobody waits for the answer
                print(f"child {child} ended with {code}: {error}", file=sys.stderr, flush=True)
            stub.close()

    def _hand_on(self, child: int) -> None:
        """Signal a child as its stub was signalled, or kill it when the stub is gone."""
        stub = self._stubs.get(child)
        if stub is None:
            return
        try:
            numbers = stub.recv(64)
        except OSError:
            numbers = b""
        for number in numbers or bytes([signal.SIGKILL]):
            _signal_group(child, number)
        if not numbers:
            self._selector.unregister(stub)
            stub.close()
            del self._stubs[child]

    def _become(
        self, request: StartRequest, streams: Sequence[int], stub: socket.socket
    ) -> NoReturn:
        """In the child: turn into the program that the stub stands for."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()  # the program's own children get its signals, as under torchrun
            os.close(self._wakeup)
            os.close(self._wakeup_writer)
            for connection in (self._listener, stub, *self._stubs.values()):
                connection.close()
            self._selector.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            os.environ.clear()
            os.environ.update({**request.environment, **self._set_by_imports})
            os.environ[PARENT_VARIABLE] = str(os.getppid())
            die_with_parent()
            os.chdir(request.folder)
            sys.path[0] = request.folder
            sys.argv = [request.module, *request.arguments]
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as stop:
            code = _exit_code(stop)
        except BaseException:  # noqa: BLE001 - the interpreter's own last resort, done by hand
            traceback.print_exc()
        finally:
            end(code)


def receive(stub: socket.socket) -> tuple[StartRequest, tuple[int, int, int]]:
    """A stub's request and its standard streams.

    Raises OSError when the stub goes away and ValueError when it sends something else.
    """
    head, streams, _, _ = socket.recv_fds(stub, LENGTH.size, 3)
    if len(head) != LENGTH.size or len(streams) != 3:  # noqa: PLR2004 - stdin, stdout, stderr
        for stream in streams:
            os.close(stream)
        raise ValueError("nothing asked for")
    (length,) = LENGTH.unpack(head)
    content = bytearray()
    while len(content) < length:
        piece = stub.recv(length - len(content))
        if not piece:
            raise ConnectionError("the stub ended")
        content += piece
    value: dict[str, Any] = json.loads(content.decode("utf-8", "surrogateescape"))
    request = StartRequest(
        module=value["module"],
        arguments=tuple(value["arguments"]),
        environment=value["environment"],
        folder=value["folder"],
    )
    return request, (streams[0], streams[1], streams[2])


def end(code: int) -> NoReturn:
    """End a child as the interpreter would, but for tearing down a gigabyte of shared imports."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins the program's threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _notice(_number: int, _frame: object) -> None:
    """SIGCHLD only has to wake the selector, by the wakeup descriptor."""


def _signal_group(child: int, number: int) -> None:
    """Signal a living child (it is not reaped, so its id is still its own) and its group."""
    try:
        os.killpg(child, number)
    except ProcessLookupError:  # it has not made its session yet
        os.kill(child, number)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
