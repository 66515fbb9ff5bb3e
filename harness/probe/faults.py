"""Makes the faults of a job's script happen in a program's ranks, in the calls of its loop.

``kill`` strikes once the gradients of its step are recorded: after the backward pass, and before a
parameter is updated. A fault of the harness (``preempt``) comes from outside: the ranks wait for it
where the next step begins, so that the checkpoint of its own step is complete. What every rank of
converge's own rank code does, and how a fault is recorded, is the same
(``converge_harness.run_folder.faults``).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

from converge_harness.probe.errors import ProbeError
from converge_harness.run_folder.faults import (
    HELD,
    hold_until,
    over_file,
    record_struck,
    struck_file,
)
from converge_harness.run_folder.job import RankJob

_KILL = "kill"


class ScriptedFaults:
    """The faults that one rank has to make, or to wait for, in one pass."""

    def __init__(self, job: RankJob, rank: int, pass_number: int) -> None:
        """Raises ProbeError for a fault that the probe cannot make."""
        unknown = [each.kind for each in job.faults if each.kind not in (_KILL, *HELD)]
        if unknown:
            raise ProbeError(
                f"{job.name}: a probe cannot make the fault {unknown[0]}, only {_KILL}"
            )
        self._job = job
        self._pass_number = pass_number
        happened = {
            index for index in range(len(job.faults)) if struck_file(job.run_folder, index).exists()
        }
        self._kills = {
            fault.step: index
            for index, fault in enumerate(job.faults)
            if fault.kind == _KILL and fault.rank == rank and index not in happened
        }
        self._held = {
            fault.step: over_file(job.run_folder, index)
            for index, fault in enumerate(job.faults)
            if fault.kind in HELD and index not in happened
        }

    def in_step(self, step: int) -> None:
        """Kill this rank if the script says so; called when its gradients are complete."""
        index = self._kills.get(step)
        if index is not None:
            fault = self._job.faults[index]
            record_struck(self._job.run_folder, index, fault, self._pass_number)
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, step: int) -> None:
        """Wait for a fault of the harness after a step; called where the next one begins."""
        over = self._held.pop(step, None)
        if over is not None:
            _hold(over)


def _hold(over: Path) -> None:
    """Wait until SIGTERM comes, which the program then gets, or until the fault is over.

    A program that handles SIGTERM sets a flag and goes on to its next checkpoint: waiting here any
    longer would use up the time that it is given for that. Only the main thread may handle signals.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is None or threading.current_thread() is not threading.main_thread():
        hold_until(over)
        return
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGTERM, note)
    try:
        hold_until(over, lambda: came)
    finally:
        signal.signal(signal.SIGTERM, before)
    if came:
        os.kill(os.getpid(), signal.SIGTERM)
