"""The status of every job of a plan: its record, else the scheduler's state, with one query."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from converge_harness.errors import ClusterError
from converge_harness.launch.options import RunOptions
from converge_harness.launch.scheduler.backend import Backend, JobState, Known, Phase, ScriptRequest
from converge_harness.launch.scheduler.result import facts, result_of, skipped
from converge_harness.launch.scheduler.script_end import has_ended
from converge_harness.launch.scheduler.submission import Submission, read_submission
from converge_harness.launch.stopping import read_if_stopped
from converge_harness.model import Cluster, Experiment, Job, RunRecord, RunStatus
from converge_harness.run_folder.layout import RECORD
from converge_harness.store import Store, folder_key, read_record
from converge_harness.trainers import is_complete

UNKNOWN_LOOKS = 3
"""A job counts as lost after this many polls in a row in which the scheduler does not list it."""
_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Site:
    """The scheduler for all jobs of a matrix, and the options."""

    store: Store
    backend: Backend
    cluster: Cluster
    experiment: Experiment
    options: RunOptions


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job's status by its run folder and the scheduler."""

    job: Job
    folder: Path
    """The run folder, which need not exist."""
    record: RunRecord | None = None
    """For a run that is over and has a record."""
    submission: Submission | None = None
    """For a job without a record that was submitted."""
    state: JobState | None = None
    """The scheduler's answer; None if it was not asked."""

    @property
    def finished(self) -> bool:
        """Whether it has complete results, and can be reused."""
        record = self.record
        return (
            record is not None
            and record.status is RunStatus.FINISHED
            and is_complete(self.job, record.folder)
        )

    @property
    def in_queue(self) -> bool:
        """Whether the scheduler runs it or will run it."""
        state = self.state
        return (
            state is not None and state.phase in (Phase.PENDING, Phase.RUNNING) and not state.never
        )

    @property
    def is_dying(self) -> bool:
        """Whether converge has cancelled it but it is not over yet."""
        return self.in_queue and self.submission is not None and bool(self.submission.cancelled)


def files_of(
    job: Job, folder: Path, site: Site, *, continues_after: int | None = None
) -> dict[str, str]:
    """What is written into the run folder of a job before it is submitted, by file name.

    Raises ConfigError as ``Backend.files`` does.
    """
    return site.backend.files(
        ScriptRequest(
            job,
            folder,
            site.cluster,
            experiment=site.experiment.name,
            rank_module=site.options.rank_module,
            continues_after=continues_after,
            data=site.options.data_of(job),
        )
    )


def read_statuses(site: Site, jobs: Iterable[Job]) -> dict[str, JobStatus]:
    """The status of jobs, by identity and in their order. Writes nothing.

    Raises:
        StoreError: a file in a run folder is damaged or of a newer schema.
        ClusterError: the scheduler cannot be reached. It is asked only about submitted jobs.
    """
    folders = site.store.run_folders()
    statuses = {job.identity: _on_disk(site.store, job, folders) for job in jobs}
    return poll_statuses(site.backend, statuses)


def poll_statuses(backend: Backend, statuses: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """The same jobs with the scheduler's current states.

    Raises ClusterError if it cannot be reached, or if it does not show another user's jobs, which
    may be running.
    """
    ids = [id_ for each in statuses.values() if (id_ := _job_id(each)) is not None]
    states = backend.poll(ids) if ids else {}
    asked = {
        identity: replace(each, state=_state(each, states)) for identity, each in statuses.items()
    }
    hidden = [each for each in asked.values() if _is_hidden(each)]
    if hidden and hidden[0].submission is not None:
        raise ClusterError(
            f"{names_of([each.job for each in hidden])}: submitted by user number "
            f"{hidden[0].submission.uid}, whose jobs the scheduler does not show to you; let that "
            "user run the command, or use another --store"
        )
    return asked


def poll_lost(
    site: Site, statuses: Mapping[str, JobStatus], stop: Callable[[], None] = lambda: None
) -> dict[str, JobStatus]:
    """The same jobs, after more queries for those that the scheduler does not know.

    One empty answer may be wrong, unless the script has written ``ended.json``. ``stop`` is called
    between queries.

    Raises ClusterError as ``poll_statuses`` does, and whatever ``stop`` raises.
    """
    found = dict(statuses)
    for _ in range(UNKNOWN_LOOKS - 1):
        lost = {identity: each for identity, each in found.items() if _is_lost(each)}
        if not lost:
            break
        stop()
        time.sleep(min(site.cluster.poll_s, _AGAIN_S))
        found |= poll_statuses(site.backend, lost)
    return found


def _is_lost(job_status: JobStatus) -> bool:
    unknown = job_status.state is not None and job_status.state.phase is Phase.UNKNOWN
    return unknown and not has_ended(job_status.folder)


def state_of(submission: Submission, states: Mapping[str, JobState]) -> JobState:
    """The polled state of a submitted job; unknown if its id now belongs to another job."""
    state = states.get(submission.job_id or "", JobState(Phase.UNKNOWN))
    is_another = state.name not in ("", submission.name)
    return JobState(Phase.UNKNOWN) if is_another else state


def _is_hidden(job_status: JobStatus) -> bool:
    submission, state = job_status.submission, job_status.state
    if submission is None or submission.uid in (None, os.getuid()):
        return False
    unknown = state is None or state.phase is Phase.UNKNOWN
    return unknown and not has_ended(job_status.folder)


def known_of(site: Site, job_status: JobStatus, needed: RunRecord | None) -> Known | None:
    """What ``result_of`` needs; None if the job was not submitted."""
    if job_status.submission is None or job_status.state is None:
        return None
    return Known(
        job=job_status.job,
        folder=job_status.folder,
        submission=job_status.submission,
        state=job_status.state,
        cluster=site.cluster,
        backend=site.backend,
        needed=needed,
    )


def write_record(site: Site, known: Known) -> RunRecord | None:
    """Write the record of a job that is over; None if it is not, or another process writes it.

    A job that will never start is cancelled first, because nobody would look for it once it has a
    record. If two processes follow the same job, the first record counts.

    Raises StoreError if the record cannot be written, and ClusterError if a job that never starts
    cannot be cancelled.
    """
    if result_of(known) is None:
        return None
    lock = site.store.lock(known.job.identity)
    if not lock.acquire():
        return None
    try:
        if (known.folder / RECORD).is_file():
            there = replace(read_record(known.folder), name=known.job.name)
            read_if_stopped(known.job, there, site.options)
            return there
        current = read_submission(known.folder)
        if current is not None:  # None: the run folder was deleted
            if current.job_id != known.submission.job_id:
                return None  # submitted again by another process
            if current.cancelled:  # perhaps by another process
                known = replace(known, submission=current)
        if known.state.never and known.submission.job_id is not None:
            site.backend.cancel([known.submission.job_id])
        record = result_of(known)
        if record is not None:
            record = site.store.finish_run(record, facts(known))
            read_if_stopped(known.job, record, site.options)
        return record
    finally:
        lock.release()


def write_records(
    site: Site, statuses: Mapping[str, JobStatus]
) -> tuple[dict[str, JobStatus], list[RunRecord]]:
    """Write the records of all jobs that are over; return the updated statuses.

    Jobs come after those that they need, as in a plan.
    """
    after = dict(statuses)
    written = []
    for identity, job_status in statuses.items():
        needed = record_of_needed(job_status.job, after)
        known = known_of(site, job_status, needed)
        record = write_record(site, known) if known is not None else None
        if record is not None:
            after[identity] = replace(job_status, record=record, submission=None, state=None)
            written.append(record)
    return after, written


def record_of_needed(job: Job, statuses: Mapping[str, JobStatus]) -> RunRecord | None:
    """The record of the seed-checkpoint job that a job starts from, if it has one."""
    needed = statuses.get(job.needs) if job.needs else None
    return needed.record if needed else None


def never_submitted(job_status: JobStatus, statuses: Mapping[str, JobStatus]) -> RunRecord | None:
    """The record of a job that is not submitted because a job that it needs did not finish."""
    needed = record_of_needed(job_status.job, statuses)
    if job_status.record is not None or job_status.submission is not None or needed is None:
        return None
    if needed.status is RunStatus.FINISHED:
        return None
    return skipped(job_status.job, job_status.folder, needed)


def names_of(jobs: Sequence[Job], most: int = 5) -> str:
    """``a, b and 3 more``."""
    shown = ", ".join(job.name for job in jobs[:most])
    return f"{shown} and {len(jobs) - most} more" if len(jobs) > most else shown


def _on_disk(store: Store, job: Job, folders: Mapping[str, Path]) -> JobStatus:
    folder = folders.get(folder_key(job.identity))
    if folder is None:
        return JobStatus(job, store.run_folder(job.name, job.identity).absolute())
    folder = folder.absolute()
    if (folder / RECORD).is_file():
        record = read_record(folder)
        if record.identity == job.identity:
            return JobStatus(job, folder, record=replace(record, name=job.name))
    submission = read_submission(folder)
    if submission is not None and submission.identity != job.identity:
        submission = None  # as with records: a copied folder may belong to another job
    return JobStatus(job, folder, submission=submission)


def _job_id(job_status: JobStatus) -> str | None:
    return job_status.submission.job_id if job_status.submission else None


def _state(job_status: JobStatus, states: Mapping[str, JobState]) -> JobState | None:
    if job_status.submission is None:
        return None
    if job_status.submission.job_id is None:
        # converge died before it knew the id. If the script has ended, that is enough.
        ended = has_ended(job_status.folder)
        return JobState(Phase.UNKNOWN) if ended else None
    return state_of(job_status.submission, states)
