"""Submits the jobs of a plan to a scheduler, each once, and cancels them.

``prepare_plan`` finds what has to be submitted, ``Submitter`` submits it (run folder, script,
dependencies), and ``cancel_all`` cancels.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from converge_harness.errors import ClusterError, StoreError
from converge_harness.launch.check import check_jobs, require_seed_checkpoints, unchecked
from converge_harness.launch.continuing import continues_from
from converge_harness.launch.events import (
    Ended,
    GoingOn,
    Notice,
    Observer,
    Preparing,
    Queued,
    Reused,
    RunsElsewhere,
)
from converge_harness.launch.interruption import Interruption
from converge_harness.launch.scheduler.backend import (
    Backend,
    JobState,
    Known,
    Phase,
    Refused,
    SubmitRequest,
)
from converge_harness.launch.scheduler.job_status import (
    JobStatus,
    Site,
    files_of,
    names_of,
    poll_lost,
    poll_statuses,
    read_statuses,
    write_records,
)
from converge_harness.launch.scheduler.result import facts, skipped
from converge_harness.launch.scheduler.script_end import has_ended
from converge_harness.launch.scheduler.submission import (
    Submission,
    job_name,
    read_submission,
    write_submission,
)
from converge_harness.launch.stopping import used_again
from converge_harness.launch.warm import WarmServers
from converge_harness.model import Job, Plan, RankError, RunRecord, RunStatus
from converge_harness.run_folder.layout import (
    JOB_SCRIPT,
    LOGS,
    RECORD,
    STARTED,
    SUBMISSION,
    calls_so_far,
    seed_checkpoint_of,
)
from converge_harness.seal import stale
from converge_harness.store import atomic_write, read_record
from converge_harness.trainers import Resources, environment, job_payload
from converge_harness.wording import counted

_DYING_S = 120.0
"""Longest wait for cancelled jobs; Slurm kills them after ``KillWait``, 30 s."""
_DYING_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """What has to be done when a plan starts or is resumed."""

    statuses: dict[str, JobStatus]
    """Statuses of all jobs, by identity, after the records of finished ones were written."""
    todo: tuple[Job, ...]
    """Jobs to submit, in the plan's order."""

    @property
    def records(self) -> dict[str, RunRecord]:
        """Records of the jobs that do not run again, by identity."""
        again = {job.identity for job in self.todo}
        return {
            identity: each.record
            for identity, each in self.statuses.items()
            if each.record is not None and identity not in again
        }

    @property
    def queued(self) -> dict[str, JobStatus]:
        """The jobs that the scheduler has, by identity."""
        return {identity: each for identity, each in self.statuses.items() if each.in_queue}


def prepare_plan(plan: Plan, site: Site, observer: Observer, stop: Interruption) -> PreparedPlan:
    """Find what is in the queue, write the records of what is over, and check the rest.

    A job runs again if it failed, or if its evidence or one of its sources has changed since.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was submitted.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached.
        Interrupted: a signal came.
    """
    site.store.require_writable()
    statuses = _await_dying(read_statuses(site, plan.jobs), site, observer, stop)
    statuses, written = write_records(site, poll_lost(site, statuses, stop.check))
    for record in written:
        if record.status is not RunStatus.FINISHED:
            observer(Ended(time.time(), statuses[record.identity].job, record))
    fresh = site.options.fresh
    todo = []
    for identity, job_status in statuses.items():
        if job_status.in_queue:
            continue
        if job_status.record is None or not job_status.finished or fresh:
            todo.append(job_status.job)
            continue
        if why := stale(job_status.record):
            observer(Notice(time.time(), f"{job_status.job.name} runs again: {why}"))
            todo.append(job_status.job)
            continue
        statuses[identity] = _reused(job_status, job_status.record, observer)
    records = PreparedPlan(statuses, tuple(todo)).records
    if not fresh:
        again, *_ = used_again(todo, records, site.store, site.experiment, site.options)
        for identity, record in again.items():
            statuses[identity] = _reused(statuses[identity], record, observer)
        todo = [job for job in todo if job.identity not in again]
    prepared = PreparedPlan(statuses, tuple(todo))
    _say_what_runs_again(todo, statuses, observer)
    queued = [each.job for each in prepared.queued.values()]
    require_seed_checkpoints((*queued, *todo), prepared.records, site.store)
    for job in todo:
        # Reports problems now, before anything is submitted.
        files_of(job, statuses[job.identity].folder, site)
    _check(todo, site, observer, stop)
    return prepared


def _reused(job_status: JobStatus, record: RunRecord, observer: Observer) -> JobStatus:
    found = replace(record, reused=True)
    observer(Reused(time.time(), job_status.job, found))
    return replace(job_status, record=found)


def _say_what_runs_again(
    todo: Sequence[Job], statuses: Mapping[str, JobStatus], observer: Observer
) -> None:
    by_status: dict[RunStatus, list[Job]] = {}
    for job in todo:
        record = statuses[job.identity].record
        if record is not None and record.status is not RunStatus.FINISHED:
            by_status.setdefault(record.status, []).append(job)
    for status, jobs in by_status.items():
        observer(Notice(time.time(), f"runs again: {names_of(jobs)} ({status} before)"))


def _await_dying(
    statuses: dict[str, JobStatus], site: Site, observer: Observer, stop: Interruption
) -> dict[str, JobStatus]:
    """Wait until cancelled jobs are over, because they will run again in the same folders."""
    deadline = time.monotonic() + _DYING_S
    reported = False
    while dying := [each.job for each in statuses.values() if each.is_dying]:
        if not reported:
            observer(
                Preparing(time.time(), f"waiting for cancelled jobs to end: {names_of(dying)}")
            )
            reported = True
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{names_of(dying)}: cancelled, but still not over; see "
                f"{site.backend.queue_command}, and run the same command again later"
            )
        stop.check()
        time.sleep(min(_DYING_POLL_S, site.cluster.poll_s))
        statuses = poll_statuses(site.backend, statuses)
    return statuses


def _check(jobs: Sequence[Job], site: Site, observer: Observer, stop: Interruption) -> None:
    """Let the toolchains, which are also on this machine, check the configs of jobs."""
    asked = [job for job in jobs if job.spec.trainer.can.checks_config]
    to_check = unchecked(asked, site.store) if site.options.check else ()
    if not to_check:
        return
    observer(Preparing(time.time(), f"checking {counted(len(to_check), 'config')}"))
    inherited, device = dict(os.environ), site.options.device
    servers = WarmServers(environment(inherited, Resources(device=device)), device)
    try:
        check_jobs(to_check, site.store, site.options, inherited, servers, stop)
    finally:
        servers.close()


class Submitter:
    """Submits jobs one by one, in the plan's order."""

    def __init__(self, prepared: PreparedPlan, site: Site, observer: Observer) -> None:
        self._site = site
        self._tell = observer
        self._before = dict(prepared.statuses)
        self._folders = {identity: each.folder for identity, each in prepared.statuses.items()}
        queued = [each.submission for each in prepared.queued.values() if each.submission]
        self._ids = {each.identity: each.job_id for each in queued if each.job_id is not None}
        self._elsewhere: set[str] = set()
        self._recorded: dict[str, RunRecord] = {}
        self.chains = chains_of(site.cluster.max_jobs, queued)
        self.busy = ""
        """Why the scheduler accepts no job for now; empty: it does."""
        self.ours: set[str] = set()
        """Identities of the jobs that this process has submitted."""
        self.again: list[str] = []
        """Ids of those that were submitted before, and are over."""

    def folder_of(self, job: Job) -> Path:
        """Its run folder, which need not exist."""
        return self._folders[job.identity]

    def give(self, job: Job, needed: RunRecord | None) -> Submission | RunRecord | None:
        """Submit a job; return its record if there is one already, None to try again.

        Try again if another process handles it, if the scheduler accepts no more for now
        (``busy``), or if the job whose weights it needs has not been submitted yet. ``needed`` is
        that job's record, None while it has none.

        Raises StoreError and ClusterError.
        """
        self.busy = ""
        if needed is None and job.needs in self._ids:
            needed = self._over_meanwhile(job.needs)
        if needed is not None and needed.status is not RunStatus.FINISHED:
            return skipped(job, self._folders[job.identity], needed)
        if job.needs is not None and needed is None and job.needs not in self._ids:
            return None
        lock = self._site.store.lock(job.identity)
        if not lock.acquire():
            if job.identity not in self._elsewhere:
                self._elsewhere.add(job.identity)
                self._tell(RunsElsewhere(time.time(), job))
            return None
        try:
            return self._of_another(job) or self._submit(job, needed)
        finally:
            lock.release()

    def _over_meanwhile(self, identity: str) -> RunRecord | None:
        """The record of a job that has ended since it was seen in the queue; else None.

        A scheduler soon forgets such a job, and then never starts jobs that depend on its success.
        """
        if identity not in self._recorded and has_ended(self._folders[identity]):
            job_status = read_statuses(self._site, [self._before[identity].job])
            after, _ = write_records(self._site, job_status)
            if (record := after[identity].record) is not None:
                self._recorded[identity] = record
        return self._recorded.get(identity)

    def _of_another(self, job: Job) -> Submission | RunRecord | None:
        """What another process did with the job meanwhile."""
        folder, before = self._folders[job.identity], self._before[job.identity]
        if (folder / RECORD).is_file():
            record = read_record(folder)
            old = before.record and replace(before.record, name=record.name, reused=False)
            new = record.status is RunStatus.FINISHED and record != old
            return replace(record, name=job.name, reused=True) if new else None
        submission = read_submission(folder)
        if submission is None or submission.job_id is None or submission == before.submission:
            return None
        self._note(job, submission.job_id)
        return submission

    def _submit(self, job: Job, needed: RunRecord | None) -> Submission | RunRecord | None:
        folder = self._folders[job.identity]
        before = self._before[job.identity]
        perhaps_there = before.submission is not None and before.submission.job_id is None
        if perhaps_there and has_ended(folder):
            return before.submission  # it was in the queue, and is over
        over = (folder / SUBMISSION).is_file() and not (perhaps_there and _has_started(folder))
        # The folder of a possibly running job must not be cleaned; it was prepared for the same
        # identity, so its content is the same.
        if perhaps_there and before.submission is not None:
            after = before.submission.continues_after
        else:
            after = self._make_ready(job, folder, needed)
        for name, text in files_of(job, folder, self._site, continues_after=after).items():
            atomic_write(folder / name, text.encode())
        wanted = job.needs if job.needs is not None and needed is None else None
        request = SubmitRequest(
            script=folder / JOB_SCRIPT,
            name=job_name(job),
            after_ok=(self._ids[wanted],) if wanted is not None else (),
            after_any=self.chains.waits_for(),
            perhaps_there=perhaps_there,
        )
        submission = Submission(
            identity=job.identity,
            name=request.name,
            submitted=datetime.now(UTC).isoformat(timespec="milliseconds"),
            after_ok=request.after_ok,
            after_any=request.after_any,
            uid=os.getuid(),
            continues_after=after,
        )
        write_submission(folder, submission)
        # Keep the submission: the lost answer may have been a success.
        self._before[job.identity] = replace(before, record=None, submission=submission)
        try:
            job_id = self._site.backend.submit(request)
        except Refused as answer:
            if answer.for_now:
                self.busy = str(answer)
                return None
            return self._refused(job, folder, submission, str(answer))
        submission = replace(submission, job_id=job_id)
        try:
            write_submission(folder, submission)
        except StoreError:
            self._site.backend.cancel([job_id])  # otherwise nothing would follow it
            raise
        self.ours.add(job.identity)
        self.again += [job_id] if over else []
        self._note(job, job_id)
        to_create = self._site.backend.to_create
        self._tell(Queued(time.time(), job, job_id, to_create=to_create))
        return submission

    def _note(self, job: Job, job_id: str) -> None:
        self._ids[job.identity] = job_id
        self.chains.add(job_id)

    def _make_ready(self, job: Job, folder: Path, needed: RunRecord | None) -> int | None:
        """Make the run folder ready for a job that is not in the queue.

        Returns the number of its last call so far if it continues from a checkpoint, else None.
        """
        store, options = self._site.store, self._site.options
        seed = job.starts_from
        if job.needs is not None:
            seed = seed_checkpoint_of(needed.folder if needed else self._folders[job.needs])
        payload = job_payload(
            job,
            folder,
            data=options.data_of(job),
            seed_checkpoint=seed,
            device=self._site.cluster.device,
        )
        step = None if options.fresh else continues_from(store, job, folder, payload)
        if step is None:
            store.start_run(folder, payload)
            return None
        store.continue_run(folder)
        reason = f"from its checkpoint of step {step}"
        self._tell(GoingOn(time.time(), job, reason, self._site.backend.submit_argv(folder)))
        return calls_so_far(folder / LOGS)

    def _refused(self, job: Job, folder: Path, submission: Submission, words: str) -> RunRecord:
        known = Known(
            job,
            folder,
            submission,
            JobState(Phase.ENDED, word="REFUSED"),
            self._site.cluster,
            self._site.backend,
        )
        record = RunRecord(
            name=job.name,
            identity=job.identity,
            folder=folder,
            status=RunStatus.REFUSED,
            wall_s=0.0,
            argv=known.argv,
            error=RankError(None, self._site.backend.with_keys(words, self._site.cluster)),
        )
        return self._site.store.finish_run(record, facts(known))


def _has_started(folder: Path) -> bool:
    return (folder / STARTED).is_dir() or (folder / LOGS).is_dir()


@dataclass(slots=True)
class Chains:
    """Limits how many jobs run at a time by dependencies, so that converge need not stay. Pure.

    There are ``limit`` chains of jobs, in each of which a job waits for the previous one. None: no
    limit.
    """

    limit: int | None
    ends: deque[str] = field(default_factory=deque)
    """The last job of every chain, oldest first."""

    def waits_for(self) -> tuple[str, ...]:
        """The jobs that must be over before the next one."""
        surplus = len(self.ends) + 1 - self.limit if self.limit is not None else 0
        return tuple(list(self.ends)[: max(surplus, 0)])

    def add(self, job_id: str) -> None:
        """Add a submitted job that waits for ``waits_for()``."""
        for _ in self.waits_for():
            self.ends.popleft()
        self.ends.append(job_id)

    def is_over(self, job_id: str) -> None:
        if job_id in self.ends:
            self.ends.remove(job_id)


def chains_of(limit: int | None, submissions: Iterable[Submission]) -> Chains:
    """The chains of jobs that are already in the queue."""
    queued = sorted(submissions, key=lambda each: each.submitted)
    waited_for = {id_ for each in queued for id_ in each.after_any}
    ids = [each.job_id for each in queued if each.job_id is not None]
    return Chains(limit, deque(id_ for id_ in ids if id_ not in waited_for))


def cancel_all(backend: Backend, jobs: Mapping[Path, Submission]) -> StoreError | None:
    """Write the submissions of jobs by run folder, with the reason, then cancel the jobs.

    They are cancelled even if that cannot be written; the first such error is returned.

    Raises ClusterError if the scheduler cannot be reached.
    """
    unwritten = None
    for folder, submission in jobs.items():
        try:
            write_submission(folder, submission)
        except StoreError as error:
            unwritten = unwritten or error
    backend.cancel([each.job_id for each in jobs.values() if each.job_id])
    return unwritten
