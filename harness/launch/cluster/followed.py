"""One job in a scheduler's hands, as it is followed: how far it is, and whether it stands still."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from harness.launch.cluster.backend import JobState, Phase
from harness.launch.cluster.settle import has_ended
from harness.launch.cluster.standing import UNKNOWN_LOOKS
from harness.launch.cluster.submission import Submission
from harness.launch.progress import MetricsTail, remaining_s
from harness.model import Experiment, Job
from harness.run_folder.metrics import StepLine
from harness.trainers import comes_in_passes


@dataclass(slots=True)
class Followed:
    """What is kept of a job between two looks: some numbers, however long it runs."""

    job: Job
    folder: Path
    submission: Submission
    tail: MetricsTail
    state: JobState | None = None
    """What the scheduler said last."""
    told_to_end: bool = False
    """Whether this harness has cancelled it."""
    runs: bool = False
    """Whether its newest life has been told as started."""
    lives: int = 0
    """Lives that were told."""
    restarts: int = 0
    last: StepLine | None = None
    made: int = 0
    """Steps that were seen to end, replayed ones included."""
    _life_since: float = 0.0
    """When its newest life, or the newest part of it, began; by the monotonic clock."""
    _first_step_at: float = 0.0
    _last_step_at: float = 0.0
    _unknown: int = 0
    """Looks in a row at which nobody knew of it."""
    _stepped: bool = False
    """Whether a step has ended since ``_life_since``."""

    @property
    def is_running(self) -> bool:
        return self.state is not None and self.state.phase is Phase.RUNNING

    @property
    def elapsed_s(self) -> float:
        """Since the scheduler started it; 0 while it waits."""
        return (self.state.ran_s or 0.0) if self.state is not None else 0.0

    @property
    def eta_s(self) -> float | None:
        """Until its last step, at the pace since it is followed."""
        if self.last is None:
            return None
        return remaining_s(
            self.last.step, self.job.steps, self._last_step_at - self._first_step_at, self.made - 1
        )

    def is_doubtful(self, state: JobState) -> bool:
        """Whether to ask again before a job is believed to be unknown.

        Between the queue's forgetting it and accounting's answer there may be a gap.
        """
        told = state.phase is not Phase.UNKNOWN or has_ended(self.folder)
        self._unknown = 0 if told else self._unknown + 1
        return 0 < self._unknown < UNKNOWN_LOOKS

    def new_life(self, state: JobState, restarts: int) -> None:
        """The scheduler runs it, or ran it, for the first time or again."""
        if self.lives:
            self.tail.start_over(is_over=state.phase is not Phase.RUNNING)
        self.runs, self.lives, self.restarts = True, self.lives + 1, restarts
        self._life_since = time.monotonic() - (state.ran_s or 0.0)
        self._stepped = False

    def new_steps(self) -> tuple[StepLine, ...]:
        """Steps that ended since the last call, replayed ones again."""
        had_reached = self.tail.reached
        steps = self.tail.new_steps()
        now = time.monotonic()
        if steps:
            self._last_step_at = now
            if self.last is None:
                self._first_step_at = now
            self.last = steps[-1]
            self.made += len(steps)
            self._stepped = True
        if self.tail.reached is not None and had_reached is None:
            self._life_since, self._stepped = now, False  # the next segment has to start
        return steps

    def overdue(self, experiment: Experiment) -> str:
        """Which timeout has passed, as a sentence; empty when none has, and when it does not run.

        Both count from when the scheduler ran the job, however long it waited.
        """
        if self.state is None or self.state.phase is not Phase.RUNNING:
            return ""
        if self.state.word not in ("", "RUNNING"):  # it is suspended, or ends
            return ""
        now = time.monotonic()
        if not self._stepped or self.last is None:
            limit = experiment.startup_timeout_s
            if now - self._life_since > limit:
                return f"no step finished within {limit:g} s of the start (startup_timeout_s)"
            return ""
        limit = experiment.progress_timeout_s
        if now - self._last_step_at > limit:
            return (
                f"no step finished for {limit:g} s after step {self.last.step} (progress_timeout_s)"
            )
        return ""


def follow_from(job: Job, folder: Path, submission: Submission) -> Followed:
    """A job that was submitted, by this harness or another."""
    return Followed(job, folder, submission, MetricsTail(folder, comes_in_passes(job)))
