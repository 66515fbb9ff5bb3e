"""Makes the faults of a job's script happen in a program's ranks, in the calls of its loop.

``kill`` and ``hang`` strike one rank once the gradients of its step are recorded: after the
backward pass, and before a parameter is updated. ``nan_batch`` makes the step's first forward pass
on one rank return NaN. Faults of a checkpoint break off what is written between the end of its
step and ``probe.saved`` (``write_limit.py``): ``disk_full`` on one rank, which then goes on or ends
as the program has it; ``ckpt_torn`` kills every rank that writes, in the middle of a file. With
``torn = "truncated"`` the complete checkpoint is cut, and every rank dies.

A fault of converge (``preempt``) comes from outside: the ranks wait for it where the next step
begins, so that the checkpoint of its own step is complete. It may come earlier, too, as soon as the
harness reads that the step has ended. What every rank of converge's own rank code does, and how a
fault is recorded, is the same (``converge_harness.run_folder.faults``).
"""

from __future__ import annotations

import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.write_limit import WriteLimit
from converge_harness.rank.recorder import world
from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.run_folder.faults import (
    HELD,
    hold_until,
    over_file,
    record_struck,
    struck_file,
)
from converge_harness.run_folder.job import RankFault, RankJob
from converge_harness.run_folder.layout import CHECKPOINTS

_KILL, _HANG, _NAN, _TORN, _FULL = "kill", "hang", "nan_batch", "ckpt_torn", "disk_full"
_MADE = (_KILL, _HANG, _NAN, _TORN, _FULL)
_TRUNCATED = "truncated"
"""``torn`` of a checkpoint that looks complete."""


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
        self._rank = rank
        self._pass_number = pass_number
        happened = {
            index for index in range(len(job.faults)) if struck_file(job.run_folder, index).exists()
        }

        def by_step(kinds: Collection[str], *, here: bool = False) -> dict[int, int]:
            """Index of every fault to come, by its step; ``here``: those of this rank alone."""
            return {
                fault.step: index
                for index, fault in enumerate(job.faults)
                if fault.kind in kinds
                and index not in happened
                and (not here or fault.rank == rank)
            }

        self._in_step = by_step((_KILL, _HANG), here=True)
        self._poisoned = by_step((_NAN,), here=True)
        self._of_checkpoint = by_step((_TORN, _FULL))
        self._held = {
            step: over_file(job.run_folder, index) for step, index in by_step(HELD).items()
        }
        self._limit: WriteLimit | None = None
        """While writes of this rank are broken off."""
        self._refused = False
        """Whether a write was broken off since ``checkpoint_due``."""
        self._before: Mapping[Path, _Stamp] = {}
        """The files and folders of the run as they were then."""
        self._notice: _Notice | None = None

    # ------------------------------------------------------------------ in a step

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

    def poison(
        self, model: torch.nn.Module, current_step: Callable[[], int]
    ) -> Callable[[], None] | None:
        """Let the first forward pass of a step return NaN if the script says so.

        Returns what removes the hook; None if there is none. The forward pass raises ProbeError if
        no tensor is found in what it returns.
        """
        if not self._poisoned:
            return None

        def poison(module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return output
            index = self._poisoned.pop(current_step(), None)
            if index is None:
                return output
            poisoned = []

            def made_nan(value: Any) -> Any:
                if not isinstance(value, torch.Tensor) or not value.requires_grad:
                    return value
                poisoned.append(value)
                return value * math.nan

            changed = tree_map(made_nan, output)
            if not poisoned:
                raise ProbeError(
                    f"{self._job.name}: {_NAN} cannot make the output of the model NaN: no tensor "
                    f"with a gradient is found in a {type(output).__name__}. Return a tensor, a "
                    "tuple, a dict, or a class that torch.utils._pytree knows"
                )
            self._record(index)
            return changed

        # First, so that other hooks see what the loop gets.
        return model.register_forward_hook(poison, prepend=True).remove

    # ------------------------------------------------------------------ of a checkpoint

    def checkpoint_due(self, step: int, smallest: Callable[[], int]) -> None:
        """Break off what this rank writes from now on, if the script says so; a step has ended.

        ``smallest`` gives the bytes that the file of a checkpoint has at least.

        Raises ProbeError outside of the main thread, where no write can be broken off.
        """
        fault = self._fault_of_writing(step)
        if fault is None or (fault.kind == _FULL and fault.rank != self._rank):
            return
        self._refused = False
        self._before = _stamps(self._job.run_folder)
        try:
            self._limit = WriteLimit(smallest(), lambda: self._strike_writer(step))
        except RuntimeError as error:
            raise ProbeError(
                f"{self._job.name}: cannot make the fault {fault.kind}, because probe.step() of "
                f"step {step} was not called in the main thread: {error}"
            ) from None

    def end_of_writing(self) -> None:
        """Lift the limit: the program has written the checkpoint, or begins the next step."""
        if self._limit is not None:
            self._limit.lift()
            self._limit = None

    def require_none_of_writing(self, step: int) -> None:
        """Raises ProbeError if a fault is to strike the checkpoint, which is not written yet."""
        index = self._of_checkpoint.get(step)
        if index is not None:
            raise ProbeError(
                f"{self._job.name}: {self._job.faults[index].kind} cannot strike the checkpoint of "
                f"step {step}, which is written while training goes on: let the program wait for "
                f"it in this set, and call probe.saved({step}) without written="
            )

    def written(self, step: int) -> None:
        """Called where the program says that it has written a checkpoint.

        Collective over the world where its writing was to be broken off. Raises ProbeError there if
        no write was.
        """
        fault, limit = self._fault_of_writing(step), self._limit
        self.end_of_writing()
        if fault is None:
            return
        largest = (limit.size, str(limit.open_file or "")) if limit else (0, "")
        found = world.everyones((self._refused, largest))
        if not any(refused for refused, _ in found):
            who = f"rank {fault.rank}" if fault.kind == _FULL else "any rank"
            size, open_file = max(largest for _, largest in found)
            why = f" (a little more than {open_file}, which is open for writing)"
            raise ProbeError(
                f"{self._job.name}: {fault.kind} could not strike: no file that {who} wrote "
                f"between probe.step of step {step} and probe.saved({step}) has more than {size} "
                f"bytes{why if open_file else ''}. Write the checkpoint there, in the rank's own "
                "process"
            )

    def saved(self, step: int) -> None:
        """Cut the checkpoint of a step if the script says so; called once it is complete.

        Collective over the world where it does, and no rank returns then.
        """
        index = self._of_checkpoint.get(step)
        if index is None or self._job.faults[index].torn != _TRUNCATED:
            return
        if world.rank() == 0:
            largest = _largest_file(self._job.checkpoints, self._job.run_folder, step)
            self._record(index)
            _cut(largest)
        world.everyones(None)  # no rank dies before it is cut
        os.kill(os.getpid(), signal.SIGKILL)

    def _fault_of_writing(self, step: int) -> RankFault | None:
        """The fault that breaks off the checkpoint of a step."""
        index = self._of_checkpoint.get(step)
        fault = None if index is None else self._job.faults[index]
        return None if fault is None or fault.torn == _TRUNCATED else fault

    def _strike_writer(self, step: int) -> None:
        """Called when a write has been broken off."""
        index = self._of_checkpoint[step]
        dies = self._job.faults[index].kind == _TORN
        try:
            if not self._refused:
                self._refused = True
                self._record(index, rank=self._rank, torn=self._tears_a_checkpoint())
        finally:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)

    def _tears_a_checkpoint(self) -> bool:
        """Whether what was broken off is in the folder of checkpoints, as far as files show.

        Mostly it is now a file of the limit's size. But safetensors removes what it could not
        write, and a file that was to be enlarged before it is filled is still empty. Then any
        change in that folder counts, unless a file elsewhere in the run folder has that size.
        """
        size = self._limit.size if self._limit else 0
        now = _stamps(self._job.run_folder)
        changed = {path for path, stamp in now.items() if self._before.get(path) != stamp}
        changed -= {path.parent for path in self._before.keys() - now.keys()}  # something removed
        checkpoints = self._job.run_folder / CHECKPOINTS
        inside = {path for path in changed if path.is_relative_to(checkpoints)}
        halves = {path for path in changed if now[path].is_file and now[path].size == size}
        return bool(inside & halves if halves else inside)

    def _record(self, index: int, *, rank: int | None = None, torn: bool | None = None) -> None:
        fault = self._job.faults[index]
        run_folder, number = self._job.run_folder, self._pass_number
        record_struck(run_folder, index, fault, number, rank=rank, torn=torn)

    # ------------------------------------------------------------------ of converge

    def step_ended(self, step: int) -> None:
        """Called before converge learns that a step has ended: from then on a fault may come."""
        if step in self._held:
            self._notice = _Notice()

    def after_step(self, step: int) -> None:
        """Wait for a fault of converge after a step; called where the next one begins.

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


class _Stamp(NamedTuple):
    """By which a change of a file is noticed, or of the names in a folder."""

    is_file: bool
    size: int
    inode: int
    changed_at: int


def _stamps(folder: Path) -> dict[Path, _Stamp]:
    """Of everything in a folder, and of the folders themselves."""
    found = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root), *(Path(root, name) for name in names)):
            with suppress(OSError):  # another rank has renamed or removed it meanwhile
                of = path.stat()
                is_file = stat.S_ISREG(of.st_mode)
                found[path] = _Stamp(is_file, of.st_size, of.st_ino, of.st_mtime_ns)
    return found


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
