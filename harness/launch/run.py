"""One job while its processes run: how far it is, and what came of it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.launch.failure import AGENT_LOG, log_tail, rank_error, rank_log
from harness.launch.progress import MetricsTail, Pace, StepLine, remaining_s
from harness.launch.warm import SERVER_GONE
from harness.model import Experiment, Job, RankError, RunRecord, RunStatus
from harness.store import RunLock
from harness.trainers import is_complete


@dataclass(slots=True)
class Run:
    """A started job: its process, its slots, and how far it is."""

    job: Job
    folder: Path
    argv: tuple[str, ...]
    """The torchrun call as a user would type it."""
    slots: tuple[int, ...]
    attempt: int
    lock: RunLock
    process: subprocess.Popen[bytes]
    warm: bool
    environment: Mapping[str, str]
    """What is pinned in the environment of its processes."""
    payload: Mapping[str, Any]
    tail: MetricsTail
    started: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    last: StepLine | None = None
    first_step: int = 0
    first_step_at: float = 0.0
    last_step_at: float = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def eta_s(self) -> float | None:
        """Until the last step, at the pace since the first."""
        if self.last is None:
            return None
        return remaining_s(
            self.last.step,
            self.job.steps,
            self.last_step_at - self.first_step_at,
            self.first_step,
        )

    @property
    def pace(self) -> Pace:
        return Pace(self.job.world_size, self.elapsed_s, self.eta_s)

    def new_steps(self) -> tuple[StepLine, ...]:
        """Steps that ended since the last call."""
        steps = self.tail.new_steps()
        if steps:
            self.last_step_at = time.monotonic()
            if self.last is None:
                self.first_step, self.first_step_at = steps[0].step, self.last_step_at
            self.last = steps[-1]
        return steps

    def overdue(self, experiment: Experiment) -> str:
        """Which timeout has passed, as a sentence; empty when none has."""
        if self.last is None:
            limit = experiment.startup_timeout_s
            if self.elapsed_s > limit:
                return f"no step finished within {limit:g} s of the start (startup_timeout_s)"
        elif time.monotonic() - self.last_step_at > experiment.progress_timeout_s:
            limit = experiment.progress_timeout_s
            return (
                f"no step finished for {limit:g} s after step {self.last.step} (progress_timeout_s)"
            )
        return ""

    def error(self) -> RankError | None:
        """What went wrong with a job whose process has ended; None when nothing has."""
        if self.process.returncode != 0:
            if self.warm and self.process.returncode == SERVER_GONE:
                return RankError(0, "the warm start lost its server")
            return rank_error(self.folder)
        if not is_complete(self.job, self.folder):
            text = log_tail(self.folder / "logs" / AGENT_LOG)
            return RankError(0, "every rank ended well, but training is not complete", text)
        return None

    def hung(self, sentence: str) -> RankError:
        """The error of a job that was killed for a timeout, with where rank 0 stood."""
        return RankError(0, sentence, rank_log(self.folder, 0))

    def record(self, status: RunStatus, error: RankError | None) -> RunRecord:
        return RunRecord(
            name=self.job.name,
            identity=self.job.identity,
            folder=self.folder,
            status=status,
            wall_s=self.elapsed_s,
            argv=self.argv,
            error=error,
        )

    def facts(self) -> dict[str, Any]:
        """What ``record.json`` holds beside the record."""
        return {
            "started": self.started_at,
            "host": socket.gethostname(),
            "versions": dict(self.job.toolchain.versions),
            "warm": self.warm,
            "environment": dict(self.environment),
            "job": dict(self.payload),
        }
