"""Makes the faults of a job's script happen in a program's ranks, in the calls of its loop.

``kill`` and ``hang`` strike one rank once the gradients of its step are recorded: after the
backward pass, and before a parameter is updated. ``ckpt_torn`` cuts a checkpoint that looks
complete, and kills every rank. A fault of the harness (``preempt``) comes from outside: the ranks
wait for it where the next step begins, so that the checkpoint of its own step is complete. It may
come earlier, too, as soon as the harness reads that the step has ended. What every rank of
converge's own rank code does, and how a fault is recorded, is the same
(``converge_harness.run_folder.faults``).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from converge_harness.probe.errors import ProbeError
from converge_harness.rank.recorder import world
from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.run_folder.faults import (
    HELD,
    hold_until,
    over_file,
    record_struck,
    struck_file,
)
from converge_harness.run_folder.job import RankJob

_KILL, _HANG, _TORN = "kill", "hang", "ckpt_torn"
_MADE = (_KILL, _HANG, _TORN)


class ScriptedFaults:
    """The faults that one rank has to make, or to wait for, in one pass."""

    def __init__(self, job: RankJob, rank: int, pass_number: int) -> None:
        """Raises ProbeError for a fault that the probe cannot make."""
        unknown = [each.kind for each in job.faults if each.kind not in (*_MADE, *HELD)]
        if unknown:
            raise ProbeError(
                f"{job.name}: a probe cannot make the fault {unknown[0]}, only {', '.join(_MADE)}"
            )
        self._job = job
        self._pass_number = pass_number
        happened = {
            index for index in range(len(job.faults)) if struck_file(job.run_folder, index).exists()
        }
        self._in_step = {
            fault.step: index
            for index, fault in enumerate(job.faults)
            if fault.kind in (_KILL, _HANG) and fault.rank == rank and index not in happened
        }
        self._torn = {
            fault.step: index
            for index, fault in enumerate(job.faults)
            if fault.kind == _TORN and index not in happened
        }
        self._held = {
            fault.step: over_file(job.run_folder, index)
            for index, fault in enumerate(job.faults)
            if fault.kind in HELD and index not in happened
        }
        self._notice: _Notice | None = None

    def in_step(self, step: int) -> None:
        """Kill or hang this rank if the script says so; called when its gradients are complete."""
        index = self._in_step.get(step)
        if index is None:
            return
        self._record(index)
        if self._job.faults[index].kind == _KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # only a signal ends it
            time.sleep(60)

    def saved(self, step: int) -> None:
        """Tear the checkpoint of a step if the script says so; called once it is complete.

        Collective over the world where it does, and no rank returns then.
        """
        index = self._torn.get(step)
        if index is None:
            return
        if world.rank() == 0:
            largest = _largest_file(self._job.checkpoints, self._job.run_folder, step)
            self._record(index)
            _cut(largest)
        world.everyones(None)  # no rank dies before it is cut
        os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, index: int) -> None:
        record_struck(self._job.run_folder, index, self._job.faults[index], self._pass_number)

    def step_ended(self, step: int) -> None:
        """Called before converge learns that a step has ended: from then on a fault may come."""
        if step in self._held:
            self._notice = _Notice()

    def after_step(self, step: int) -> None:
        """Wait for a fault of the harness after a step; called where the next one begins.

        A program that handles SIGTERM sets a flag and goes on to its next checkpoint: waiting for
        any longer than until SIGTERM came would use up the time that it is given for that.
        """
        over = self._held.pop(step, None)
        if over is None:
            return
        notice = self._notice or _Notice()
        try:
            hold_until(over, lambda: notice.came)
        finally:
            notice.end()


def _largest_file(form: CheckpointForm, run_folder: Path, step: int) -> Path:
    """The largest file of a checkpoint, or the file that it is; not the one written last.

    Raises ProbeError if there is nothing to cut.
    """
    checkpoint = form.path(run_folder, step)
    files = [checkpoint, *checkpoint.rglob("*")]
    last = checkpoint / form.last_file if form.last_file else None
    sizes = {each: each.stat().st_size for each in files if each.is_file() and each != last}
    largest = max(sizes, key=lambda each: sizes[each], default=None)
    if largest is None or not sizes[largest]:
        raise ProbeError(f"{checkpoint}: has no content that could be cut, for the fault {_TORN}")
    return largest


def _cut(file: Path) -> None:
    """Cut a file to half of its size."""
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
        os.fsync(stream.fileno())


class _Notice:
    """Notes that SIGTERM came, which the program gets as well; only the main thread can do that."""

    def __init__(self) -> None:
        self.came = False
        self._before = signal.getsignal(signal.SIGTERM)
        # None: a handler that was not set in Python.
        in_main = threading.current_thread() is threading.main_thread()
        self._watches = self._before is not None and in_main
        if self._watches:
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def end(self) -> None:
        """Put the program's handler back, unless it has set another meanwhile."""
        if self._watches and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before)
