"""The progress of a run: new lines of its ``metrics.jsonl``, and estimates of its end.

``Growth`` is for a program without step reports: whether its output still grows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from converge_harness.model import Experiment, Job
from converge_harness.run_folder.layout import metrics_files
from converge_harness.run_folder.metrics import LoadedLine, StepLine, progress_of
from converge_harness.run_folder.passes import pass_folders
from converge_harness.trainers import trainer_of

_END_BYTES = 1 << 18
"""Enough for hundreds of steps, including lines on replicas."""


@dataclass(slots=True)
class MetricsTail:
    """Follows a run's growing ``metrics.jsonl.part`` until it is renamed; every line is read once.

    Passes of a run are followed one after another. The ranks of a pass have ended when those of the
    next start.
    """

    folder: Path
    """The run folder."""
    in_passes: bool = False
    number: int = 0
    """Number of the current pass, from 1; 0: none yet."""
    reached: int | None = None
    """The step that the newest pass had to reach, once it has reached it."""
    loaded: bool = False
    """Whether the newest pass has loaded the checkpoint from which it continues."""
    _offset: int = 0
    _stale: tuple[int, ...] | None = None
    """Identifies the file from before the ranks were restarted."""

    def start_over(self, *, is_over: bool = False) -> None:
        """The ranks were restarted without passes: existing files are from the previous start.

        ``is_over``: they have already ended, so the files are from this start.
        """
        if self.in_passes:
            return
        self._offset, self._stale = 0, None
        if is_over:
            return
        try:
            with metrics_files(self.folder)[0].open("rb") as stream:
                self._stale = _signature(stream)
        except FileNotFoundError:
            return

    def new_steps(self) -> tuple[StepLine, ...]:
        """Steps whose lines were completed since the last time."""
        if not self.in_passes:
            return self._read(metrics_files(self.folder))
        # Listed before any is read, so that an older pass is read to its end.
        folders = pass_folders(self.folder)
        steps: list[StepLine] = []
        if self.number:
            steps += self._read(metrics_files(folders[self.number - 1]))
        while self.number < len(folders):
            self.number, self.reached, self._offset = self.number + 1, None, 0
            self.loaded = False
            steps += self._read(metrics_files(folders[self.number - 1]))
        return tuple(steps)

    def _read(self, files: tuple[Path, Path]) -> tuple[StepLine, ...]:
        """The new lines of a file, which is renamed when it is complete."""
        for path in files:
            try:
                with path.open("rb") as stream:
                    if _signature(stream) == self._stale:
                        return ()
                    stream.seek(self._offset)
                    content = stream.read()
            except FileNotFoundError:
                continue
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            lines = [progress_of(text) for text in whole.splitlines()]
            ends = [line for line in lines if isinstance(line, int)]
            self.reached = ends[-1] if ends else self.reached
            self.loaded = self.loaded or any(isinstance(line, LoadedLine) for line in lines)
            return tuple(line for line in lines if isinstance(line, StepLine))
        return ()


def _signature(stream: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(stream.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def last_line(folder: Path, *, in_passes: bool) -> StepLine | None:
    """A run's last finished step, from the ends of its files; None before the first."""
    files = [metrics_files(each) for each in reversed(pass_folders(folder))]
    for pair in files if in_passes else [metrics_files(folder)]:
        for path in pair:
            lines = [progress_of(text) for text in _end_of(path).splitlines()]
            steps = [line for line in lines if isinstance(line, StepLine)]
            if steps:
                return steps[-1]
    return None


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _END_BYTES))
            return stream.read()
    except OSError:
        return b""


def remaining_s(step: int, steps: int, since_first_step_s: float, made: int) -> float | None:
    """Seconds until the last step at the pace so far; None while the pace is unknown.

    ``made`` is the number of finished steps after the first, including replayed ones.
    """
    if made < 1:
        return None
    return (steps - step) * since_first_step_s / made


@dataclass(frozen=True, slots=True)
class Pace:
    """One job in the forecast for the matrix; times in seconds."""

    ranks: int
    elapsed_s: float | None = None
    """None: not started."""
    remaining_s: float | None = None
    """None: not known yet."""


def matrix_eta_s(
    finished: Sequence[tuple[Job, float]], unfinished: Sequence[Pace], slots: int
) -> float | None:
    """Seconds until the last job ends, for jobs packed into ``slots``.

    A job whose pace is unknown is expected to take as long per rank as finished ones (``(job,
    wall_s)``) on average. None until something is known.
    """
    known = [wall / job.world_size for job, wall in finished]
    known += [
        (pace.elapsed_s + pace.remaining_s) / pace.ranks
        for pace in unfinished
        if pace.elapsed_s is not None and pace.remaining_s is not None
    ]
    if not known:
        return None
    per_rank = sum(known) / len(known)
    remaining = [
        pace.remaining_s
        if pace.remaining_s is not None
        else max(per_rank * pace.ranks - (pace.elapsed_s or 0.0), 0.0)
        for pace in unfinished
    ]
    work = sum(
        seconds * min(pace.ranks, slots)
        for seconds, pace in zip(remaining, unfinished, strict=True)
    )
    return max([work / slots, *remaining], default=0.0)


_LOOK_EVERY_S = 0.5


@dataclass(slots=True)
class Growth:
    """Follows the curve and the output of a program without the probe."""

    curves: Path
    """A file, or a folder of files."""
    logs: Path
    grew_at: float = field(default_factory=time.monotonic)
    """When growth was last seen; initially the start."""
    begun: bool = False
    """Whether the curve exists."""
    _looked_at: float = 0.0
    _seen: tuple[tuple[str, int], ...] = ()

    def look(self) -> None:
        """Check what has grown; does nothing if it was called a moment ago."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        curve, printed = sizes(self.curves), sizes(self.logs)
        self.begun = bool(curve)
        if curve + printed != self._seen:
            self._seen, self.grew_at = curve + printed, now

    def overdue(self, startup_timeout_s: float, progress_timeout_s: float) -> str:
        """Which timeout has passed, as a sentence; empty when none has."""
        limit, key = (
            (progress_timeout_s, "progress_timeout_s")
            if self.begun
            else (startup_timeout_s, "startup_timeout_s")
        )
        if time.monotonic() - self.grew_at <= limit:
            return ""
        if self.begun:
            return f"neither its curve nor its ranks' output grew for {limit:g} s ({key})"
        return f"its ranks printed nothing for {limit:g} s, and there is no {self.curves} ({key})"


def sizes(path: Path) -> tuple[tuple[str, int], ...]:
    """Every file at or below a path with its size; empty if there is none."""
    if path.is_dir():
        files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    else:
        files = [path]
    found = []
    for file in sorted(files):
        try:
            found.append((str(file), file.stat().st_size))
        except OSError:
            continue
    return tuple(found)


def no_step(
    experiment: Experiment,
    job: Job,
    last: StepLine | None,
    started: float,
    stepped_at: float | None,
) -> str:
    """The exceeded timeout of a run that reports its steps, as a sentence; empty if there is none.

    Args:
        experiment: has the timeouts.
        job: what runs.
        last: the newest step, also of an earlier call.
        started: when its ranks were started, by the monotonic clock.
        stepped_at: when they last ended a step; None: they have ended none.
    """
    now = time.monotonic()
    if last is None or stepped_at is None:
        limit = experiment.startup_timeout_s
        if now - started <= limit:
            return ""
        late = f"no step finished within {limit:g} s of the start (startup_timeout_s)"
    else:
        limit = experiment.progress_timeout_s
        if now - stepped_at <= limit:
            return ""
        late = f"no step finished for {limit:g} s after step {last.step} (progress_timeout_s)"
    # Only one rank of a user's program reports its steps: the others may wait for something.
    is_through = last is not None and last.step == job.steps
    why = "" if is_through else trainer_of(job.spec).waits_for(job)
    return f"{late}; {why}" if why else late
