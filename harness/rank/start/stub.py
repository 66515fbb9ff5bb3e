"""A stand-in for a toolchain's ``python``: its program runs as a fork of a warm server instead.

``stub.py SOCKET -u -m MODULE ARGUMENTS`` asks the server (``converge_harness.rank.start.warm``) at
SOCKET to fork a child with all heavy imports done, and to run the module there with this process's
standard streams, environment and working directory. The stub hands signals on and ends as the
child ends, so torchrun's agent can supervise it like the program itself. It is one file without
imports of ours, run by ``python -I -S``, because it starts once per rank.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import sys

PR_SET_PDEATHSIG = 1
LENGTH = struct.Struct("!I")
EXIT_CODE = struct.Struct("!i")
SERVER_GONE = 70
"""Exit code when the warm server is not there or dies (EX_SOFTWARE)."""


def main(address: str, arguments: list[str]) -> int:
    die_with_parent()
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if arguments[:1] != ["-m"]:
        print(f"converge warm start: cannot run {arguments}: not a module", file=sys.stderr)
        return SERVER_GONE
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.connect(address)
        ask(server, {"module": arguments[1], "arguments": arguments[2:]})
        code = wait(server)
    except OSError as error:
        print(f"converge warm start: lost its server: {error}", file=sys.stderr)
        return SERVER_GONE
    if code < 0:
        # As the child died of a signal, so does its stand-in: torchrun reports the signal.
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def die_with_parent() -> None:
    """As ``converge_harness.rank.start.parent``, which cannot be imported here."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    expected = os.environ.get("CONVERGE_PARENT")
    if expected is not None and os.getppid() != int(expected):
        raise SystemExit("the process that started this one has ended")


def ask(server: socket.socket, program: dict[str, object]) -> None:
    """Send the program with our standard streams, environment and working directory."""
    request = {**program, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 - pathlib costs 10 ms
    content = json.dumps(request).encode("utf-8", "surrogateescape")
    socket.send_fds(server, [LENGTH.pack(len(content))], [0, 1, 2])
    server.sendall(content)


def wait(server: socket.socket) -> int:
    """Hand signals on until the server sends the child's exit code (negative: a signal)."""

    def hand_on(number: int, _frame: object) -> None:
        try:
            server.send(bytes([number]))
        except OSError:  # it has closed the connection: its answer is there to be read, or none is
            return

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # meant for the program itself
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, hand_on)
    answer = server.recv(EXIT_CODE.size, socket.MSG_WAITALL)
    if len(answer) < EXIT_CODE.size:
        raise ConnectionError("it ended before the program did")
    return int(EXIT_CODE.unpack(answer)[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
