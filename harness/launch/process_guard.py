"""``python -I process_guard.py CALL …``: runs a user's program that has to end with converge.

Its launcher and its ranks know nothing of converge. So this process is its parent: it dies with
converge, adopts the processes that the launcher leaves behind, and ends only when none of them is
left. It does not import the package, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from types import FrameType

import psutil

PARENT_VARIABLE = "CONVERGE_PARENT"
"""As in ``converge_harness.run_folder.layout``: our agent under torchrun asks for it."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""``prctl(2)``."""
_REAP_TIMEOUT_S = 10.0
_CANNOT_START = 127


def main(call: list[str]) -> int:
    """Exit code of the call; if a signal ended it, 128 plus its number, as in a shell."""
    starter = int(os.environ.get(PARENT_VARIABLE) or os.getppid())
    _tie()
    if os.getppid() != starter:
        return _CANNOT_START
    # A hanging rank is aborted to print its stack; without a core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    program: subprocess.Popen[bytes] | None = None
    asked = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if os.getppid() != starter:
            _end_all()
            os._exit(_CANNOT_START)
        asked = True
        if program is not None:
            program.send_signal(signal.SIGTERM)

    # Set before the program starts: otherwise a signal just after its start would leave it behind.
    signal.signal(signal.SIGTERM, end)
    try:
        program = subprocess.Popen(call, env={**os.environ, PARENT_VARIABLE: str(os.getpid())})
    except OSError as error:
        sys.stderr.write(f"cannot start {call[0]}: {error.strerror or error}\n")
        return _CANNOT_START
    if asked:
        program.send_signal(signal.SIGTERM)
    code = program.wait()
    _end_all()
    return code if code >= 0 else 128 - code


def _tie() -> None:
    """Get a signal when the starter ends, and become the parent of orphans. Linux only."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end_all() -> None:
    """SIGKILL every descendant of this process, including those started meanwhile."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, stuck = psutil.wait_procs(left, timeout=_REAP_TIMEOUT_S)
        if stuck:  # in the kernel
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
