"""Lets gloo's threads finish before the interpreter goes.

A worker thread may still hold the tensors of the last collective when the program ends. Letting go
of them takes the interpreter's lock, and a thread that asks for it while the interpreter is torn
down ends the process with SIGABRT, "terminate called without an active exception"
(https://github.com/pytorch/pytorch/pull/179291). ``destroy_process_group`` may not end them:
functions of ``torch.distributed.nn``, which torch 2.13 imports when the first DDP is made, keep the
group as a default argument. And the model may be the last to hold the group, by DDP's reducer:
whoever lets go of it then joins those threads without giving up the lock, and both wait for ever.
It happens on loaded machines only, after all evidence is written; but a run whose rank aborts or
hangs is no good run.
"""

from __future__ import annotations

import atexit
import threading
import time
from pathlib import Path

_LONGEST_S = 2.0
_PAUSE_S = 0.005
_IDLE_LOOKS = 2
"""So often in a row no other thread may run: one look may fall between two of its waits."""
_TASKS = Path("/proc/self/task")


def wait_at_exit(kept: object) -> None:
    """Have the end of the program wait for threads that run, for two seconds at most.

    ``kept`` is let go of after that: what holds the model and, by it, the process group.
    """
    if _TASKS.is_dir():
        atexit.register(_wait_until_idle, kept)


def _wait_until_idle(_kept: object) -> None:
    deadline = time.monotonic() + _LONGEST_S
    idle = 0
    while idle < _IDLE_LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)  # the interpreter's lock is free meanwhile
        idle = 0 if _others_run() else idle + 1


def _others_run() -> bool:
    """Whether any other thread of this process runs or wants to."""
    own = str(threading.get_native_id())
    return any(_runs(task.name) for task in _TASKS.iterdir() if task.name != own)


def _runs(task: str) -> bool:
    try:
        stat = (_TASKS / task / "stat").read_text(errors="replace")
    except OSError:
        return False  # it has ended
    return stat.rpartition(")")[2].split()[0] == "R"
