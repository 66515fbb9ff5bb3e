"""Runs a plan on a cluster while converge stays: submit, poll and write records until all is over.

Each round makes one query for all jobs. If converge is interrupted, it cancels what it has
submitted. If it is killed, nothing is lost: the jobs go on, and the same command, or ``converge
collect``, finds them by their run folders.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from converge_harness.errors import ClusterError, ConvergeError, StoreError
from converge_harness.launch.events import Ended, GoingOn, Notice, Observer, Overview, Started, Step
from converge_harness.launch.interruption import Interruption, interruptible
from converge_harness.launch.options import Training
from converge_harness.launch.progress import Growth, MetricsTail, no_step, remaining_s
from converge_harness.launch.scheduler.backend import JobState, Known, Phase
from converge_harness.launch.scheduler.job_status import UNKNOWN_LOOKS, Site, state_of, write_record
from converge_harness.launch.scheduler.result import skipped
from converge_harness.launch.scheduler.script_end import has_ended, known_end
from converge_harness.launch.scheduler.submission import Submission, read_submission
from converge_harness.launch.scheduler.submit import (
    PreparedPlan,
    Submitter,
    cancel_all,
    prepare_plan,
)
from converge_harness.launch.stopping import Looks
from converge_harness.model import Experiment, Job, Plan, RunRecord, RunStatus
from converge_harness.run_folder.layout import LOGS
from converge_harness.run_folder.metrics import StepLine
from converge_harness.trainers import comes_in_passes, curves_of
from converge_harness.wording import counted

OUTAGE_S = 3600.0
"""How long to retry a scheduler that does not answer; its jobs go on."""
_PAUSE_S = 0.1


def follow_plan(plan: Plan, site: Site, observer: Observer) -> tuple[RunRecord, ...]:
    """Run every job of a plan; return the records in the plan's order.

    Finished jobs with the same identity are reused. Jobs that are already in the queue are
    followed, not submitted again.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was submitted.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached, at the start or for an hour.
        Interrupted: Ctrl-C or a signal; jobs submitted by this process are cancelled.
    """
    with interruptible() as stop:
        prepared = prepare_plan(plan, site, observer, stop)
        records = _Follower(prepared, site, observer).run(stop)
    return tuple(replace(records[job.identity], name=job.name) for job in plan.jobs)


class _Follower:
    """The loop; ``run`` is called once."""

    def __init__(self, prepared: PreparedPlan, site: Site, observer: Observer) -> None:
        self._site = site
        self._tell = observer
        self._queue = f"{site.backend.name}'s queue"
        self._looks = Looks(site.experiment, site.options, observer)
        self._records = prepared.records
        self._waiting = list(prepared.todo)
        self._submitter = Submitter(prepared, site, observer)
        self._followed: dict[str, Followed] = {
            identity: follow_from(each.job, each.folder, each.submission)
            for identity, each in prepared.queued.items()
            if each.submission is not None
        }
        self._reported_reasons: set[str] = set()
        self._reported_busy = ""
        self._silent_since: float | None = None
        """Since when the scheduler has not answered, by the monotonic clock."""

    def run(self, stop: Interruption) -> dict[str, RunRecord]:
        try:
            while True:
                try:
                    self._submit(stop)
                    self._round()
                    self._silent_since = None
                except ClusterError as error:
                    self._bear(error)
                self._tell(self._overview())
                if not self._waiting and not self._followed:
                    return self._records
                self._pause(stop)
        except BaseException as error:
            self._cancel_ours(str(error) if isinstance(error, ConvergeError) else "")
            raise

    # ----------------------------------------------------------- submitting

    def _submit(self, stop: Interruption) -> None:
        """Submit the remaining jobs, until the scheduler accepts no more."""
        for job in list(self._waiting):
            stop.check()
            needed = self._records.get(job.needs) if job.needs else None
            given = self._submitter.give(job, needed)
            if self._submitter.busy:
                self._say_busy(self._submitter.busy)
                return
            if isinstance(given, Submission):
                folder = self._submitter.folder_of(job)
                self._waiting.remove(job)
                self._followed[job.identity] = follow_from(job, folder, given)
            elif given is not None:
                self._waiting.remove(job)
                self._conclude(job, given)

    def _say_busy(self, why: str) -> None:
        if why != self._reported_busy:
            self._reported_busy = why
            message = f"{len(self._waiting)} jobs will be submitted later: {why}"
            self._tell(Notice(time.time(), message))

    # ------------------------------------------------------------ following

    def _round(self) -> None:
        """Check all jobs with one query; those from which others start come first."""
        if not self._followed:
            return
        ids = [each.submission.job_id for each in self._followed.values()]
        states = self._site.backend.poll([id_ for id_ in ids if id_ is not None])
        for identity, followed in list(self._followed.items()):
            state = state_of(followed.submission, states)
            followed.state = state
            self._tell_progress(followed, state)
            if followed.is_doubtful(state):
                continue
            if self._write_record(followed, state):
                del self._followed[identity]
            elif sentence := followed.overdue(self._site.experiment):
                self._cancel([followed], sentence, hung=True)
            elif reason := self._why_to_stop(followed):
                self._cancel([followed], reason, stopped=True)
        self._say_why_jobs_wait()

    def _bear(self, error: ClusterError) -> None:
        """Retry for an hour if the scheduler does not answer, then raise the error."""
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            self._tell(Notice(time.time(), f"{error}; retrying"))
        elif time.monotonic() - self._silent_since > OUTAGE_S:
            raise error

    def _tell_progress(self, followed: Followed, state: JobState) -> None:
        """Report starts, steps and restarts of a job."""
        if state.phase is Phase.PENDING:
            followed.runs = False
            return
        restarts = _unreported_start(followed, state)
        if restarts is not None:
            followed.note_start(state, restarts)
            argv = self._site.backend.submit_argv(followed.folder)
            if followed.starts == 1:
                attempt = restarts + 1
                self._tell(Started(time.time(), followed.job, (), argv, attempt, state.nodes))
            else:
                reason = f"requeued by {self._site.backend.name}, restart {restarts}"
                self._tell(GoingOn(time.time(), followed.job, reason, argv))
        for line in followed.new_steps():
            step = Step(
                time.time(),
                followed.job,
                line.step,
                line.loss,
                followed.elapsed_s,
                followed.eta_s,
            )
            self._tell(step)

    def _write_record(self, followed: Followed, state: JobState) -> bool:
        """Write the job's record if it is over; return whether it is."""
        job = followed.job
        known = Known(
            job=job,
            folder=followed.folder,
            submission=followed.submission,
            state=state,
            cluster=self._site.cluster,
            backend=self._site.backend,
            needed=self._records.get(job.needs) if job.needs else None,
        )
        record = write_record(self._site, known)
        if record is None:
            if state.phase in (Phase.ENDED, Phase.UNKNOWN):
                # Another converge process handles it: it writes the record, or has submitted it
                # again.
                followed.submission = read_submission(followed.folder) or followed.submission
            return False
        self._submitter.chains.is_over(followed.submission.job_id or "")
        self._conclude(job, record)
        return True

    def _conclude(self, job: Job, record: RunRecord) -> None:
        self._records[job.identity] = record
        self._tell(Ended(time.time(), job, record))
        if record.status is RunStatus.FINISHED:
            return
        for other in [each for each in self._waiting if each.needs == job.identity]:
            self._waiting.remove(other)
            self._conclude(other, skipped(other, self._submitter.folder_of(other), record))

    def _say_why_jobs_wait(self) -> None:
        """Report an unusual reason for waiting once."""
        found = self._reasons()
        for reason in found.keys() - self._site.backend.ordinary_reasons - self._reported_reasons:
            self._reported_reasons.add(reason)
            count = found[reason]
            jobs = f"{counted(count, 'job')} {'waits' if count == 1 else 'wait'}"
            self._tell(Notice(time.time(), f"{jobs} in {self._queue}: {reason}"))

    def _reasons(self) -> Counter[str]:
        states = (each.state for each in self._followed.values())
        return Counter(
            state.reason for state in states if state is not None and state.phase is Phase.PENDING
        )

    # -------------------------------------------------------------- ending

    def _cancel_ours(self, why: str) -> None:
        """Cancel the jobs that this process submitted, if the scheduler answers."""
        ours = [
            each for identity, each in self._followed.items() if identity in self._submitter.ours
        ]
        if not ours:
            return
        message = f"{len(ours)} jobs in {self._queue} are cancelled"
        try:
            self._cancel(ours, f"cancelled by converge ({why or 'its own end'})")
        except ClusterError as error:
            message = (
                f"{len(ours)} jobs may still be in {self._queue}, see `converge cancel`: {error}"
            )
        except StoreError as error:
            message += f", but this could not be recorded in their folders: {error}"
        self._tell(Notice(time.time(), message))

    def _why_to_stop(self, followed: Followed) -> str:
        """Why a running job may end now; empty: it trains on, or no look is due."""
        last = followed.last
        if last is None or followed.cancel_sent or not followed.is_running:
            return ""
        # A job that another converge process submitted may serve that one's sets, too.
        ours = followed.job.identity in self._submitter.ours
        if ours:
            in_passes = comes_in_passes(followed.job)
            reason = self._looks.why_to_end(
                followed.job, last.step, self._records, in_passes=in_passes
            )
            if reason:
                return reason
        if not self._looks.is_due(followed.job, last.step):
            return ""
        training = {
            identity: Training(each.folder, each.last.step)
            for identity, each in self._followed.items()
            if each.last is not None
        }
        return self._looks.why_to_stop(followed.job, self._records, training)

    def _cancel(
        self, jobs: Iterable[Followed], why: str, *, hung: bool = False, stopped: bool = False
    ) -> None:
        """Cancel jobs, and record why in their folders; they are cancelled even if that fails."""
        to_end = [each for each in jobs if not each.cancel_sent]
        for each in to_end:
            if not each.submission.cancelled:
                each.submission = replace(
                    each.submission, cancelled=why, hung=hung, stopped=stopped
                )
        failed = cancel_all(self._site.backend, {each.folder: each.submission for each in to_end})
        for each in to_end:
            each.cancel_sent = True
        if failed:
            raise failed

    def _pause(self, stop: Interruption) -> None:
        until = time.monotonic() + self._site.cluster.poll_s
        while (left := until - time.monotonic()) > 0:
            stop.check()
            time.sleep(min(left, _PAUSE_S))

    def _overview(self) -> Overview:
        running = [each for each in self._followed.values() if each.is_running]
        reasons = self._reasons()
        unfinished = len(self._followed) + len(self._waiting)
        etas = [each.eta_s for each in running]
        known = [eta for eta in etas if eta is not None]
        # There is no way to know when a queue starts a job.
        eta_s = max(known) if known and len(known) == unfinished else None
        return Overview(
            at=time.time(),
            done=len(self._records),
            total=len(self._records) + unfinished,
            running=tuple(each.job.name for each in running),
            eta_s=eta_s,
            queued=unfinished - len(running),
            reason=next((reason for reason, _ in reasons.most_common(1)), ""),
        )


def _unreported_start(followed: Followed, state: JobState) -> int | None:
    """The restart count of a start that was not reported yet; None if there is none."""
    if state.phase is Phase.RUNNING:
        is_new = not followed.runs or state.restarts > followed.restarts
        return state.restarts if is_new else None
    # A job that started and ended between two polls is known only by its script's end.
    if (end := known_end(followed.folder)) is None:
        return None
    is_new = followed.starts == 0 or end.restart > followed.restarts
    return end.restart if is_new else None


@dataclass(slots=True)
class Followed:
    """The state of a followed job between polls."""

    job: Job
    folder: Path
    submission: Submission
    tail: MetricsTail
    growth: Growth | None = None
    """For a program without step reports, since its newest start."""
    state: JobState | None = None
    """The scheduler's last answer."""
    cancel_sent: bool = False
    """Whether this process has cancelled it."""
    runs: bool = False
    """Whether its newest start has been reported."""
    starts: int = 0
    """How many starts were reported."""
    restarts: int = 0
    last: StepLine | None = None
    made: int = 0
    """Number of finished steps, including replayed ones."""
    _started: float = 0.0
    """When its newest start or segment began, by the monotonic clock."""
    _first_step_at: float = 0.0
    _last_step_at: float = 0.0
    _unknown: int = 0
    """Consecutive polls in which the scheduler did not know it."""
    _stepped: bool = False
    """Whether a step has ended since then."""

    @property
    def is_running(self) -> bool:
        return self.state is not None and self.state.phase is Phase.RUNNING

    @property
    def elapsed_s(self) -> float:
        """Seconds since the scheduler started it; 0 while it waits."""
        return (self.state.ran_s or 0.0) if self.state is not None else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until its last step, at the pace since this process began to follow it."""
        if self.last is None:
            return None
        return remaining_s(
            self.last.step, self.job.steps, self._last_step_at - self._first_step_at, self.made - 1
        )

    def is_doubtful(self, state: JobState) -> bool:
        """Whether to ask again before a job counts as unknown.

        There may be a gap between its end in the queue and its entry in accounting.
        """
        is_known = state.phase is not Phase.UNKNOWN or has_ended(self.folder)
        self._unknown = 0 if is_known else self._unknown + 1
        return 0 < self._unknown < UNKNOWN_LOOKS

    def note_start(self, state: JobState, restarts: int) -> None:
        """Record that the scheduler has started it, for the first time or again."""
        if self.starts:
            self.tail.start_over(is_over=state.phase is not Phase.RUNNING)
        self.runs, self.starts, self.restarts = True, self.starts + 1, restarts
        self._started = time.monotonic() - (state.ran_s or 0.0)
        self._stepped = False
        curves = curves_of(self.job, self.folder)
        self.growth = None if curves is None else Growth(curves, self.folder / LOGS)

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
            self._started, self._stepped = now, False  # the next segment still has to start
        return steps

    def overdue(self, experiment: Experiment) -> str:
        """The exceeded timeout, as a sentence; empty if there is none, or if it does not run.

        Both count from the scheduler's start of the job, without its time in the queue.
        """
        if self.state is None or self.state.phase is not Phase.RUNNING:
            return ""
        if self.state.paused:
            return ""
        if self.growth is not None:
            self.growth.look()
            return self.growth.overdue(experiment.startup_timeout_s, experiment.progress_timeout_s)
        stepped_at = self._last_step_at if self._stepped else None
        return no_step(experiment, self.job, self.last, self._started, stepped_at)


def follow_from(job: Job, folder: Path, submission: Submission) -> Followed:
    """A submitted job, by this process or another."""
    return Followed(job, folder, submission, MetricsTail(folder, comes_in_passes(job)))
