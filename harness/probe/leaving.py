"""Lets gloo's threads finish before the interpreter exits.

A worker thread may still hold the tensors of the last collective when the program ends. Releasing
them takes the GIL, and a thread that asks for it during interpreter shutdown ends the process with
SIGABRT, "terminate called without an active exception"
(https://github.com/pytorch/pytorch/pull/179291). ``destroy_process_group`` may not end them:
functions of ``torch.distributed.nn``, which torch 2.13 imports when the first DDP is made, keep the
group as a default argument. And the model may hold the last reference to the group, through DDP's
reducer: deleting it then joins those threads without releasing the GIL, a deadlock. It happens only
on loaded machines, after all evidence is written; but a run in which a rank aborts or hangs has
failed.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

_LONGEST_S = 2.0
_PAUSE_S = 0.005
_IDLE_LOOKS = 2
"""Threads must be idle at this many consecutive checks: one check may fall between two waits."""
_TASKS = Path("/proc/self/task")


def wait_at_exit(kept: object) -> None:
    """Let the end of the program wait for running threads, for at most two seconds.

    ``kept`` is released after that: it holds the model and so the process group.
    """
    if _TASKS.is_dir():
        atexit.register(_wait_until_idle, kept)


def _wait_until_idle(_kept: object) -> None:
    deadline = time.monotonic() + _LONGEST_S
    idle = 0
    while idle < _IDLE_LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)  # releases the GIL
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    """Whether any other thread of this process is running or runnable."""
    own = str(threading.get_native_id())
    return any(_runs(task.name) for task in _TASKS.iterdir() if task.name != own)


def _runs(task: str) -> bool:
    try:
        stat = (_TASKS / task / "stat").read_text(errors="replace")
    except OSError:
        return False  # it has ended
    return stat.rpartition(")")[2].split()[0] == "R"
