"""A rank dies with the process that started it, so that a killed converge leaves none behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from converge_harness.run_folder.layout import PARENT_VARIABLE

_PR_SET_PDEATHSIG = 1
"""``prctl(2)``: the signal this process gets when its parent dies. Cleared by fork."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends.

    torchrun's agent forwards SIGTERM to its ranks, but cannot when it is itself killed by
    SIGKILL; ranks live in sessions of their own, so killing the agent's group does not reach
    them either. No effect outside Linux.

    Raises OSError when the kernel refuses, and SystemExit when the parent died meanwhile.
    """
    if sys.platform != "linux":
        return
    parent = int(os.environ.get(PARENT_VARIABLE) or os.getppid())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    if os.getppid() != parent:
        raise SystemExit("the process that started this one has ended")
