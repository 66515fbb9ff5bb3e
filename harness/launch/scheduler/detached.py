"""A plan on a cluster without a process that stays: submit, collect, cancel, status.

Jobs are found by the plan's identities in the store, so this works from any later shell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from converge_harness.errors import StoreError
from converge_harness.launch.events import Ended, Observer
from converge_harness.launch.interruption import Interruption, interruptible
from converge_harness.launch.progress import last_line
from converge_harness.launch.scheduler.backend import Phase
from converge_harness.launch.scheduler.job_status import (
    JobStatus,
    Site,
    known_of,
    never_submitted,
    poll_lost,
    poll_statuses,
    read_statuses,
    record_of_needed,
    write_records,
)
from converge_harness.launch.scheduler.result import result_of
from converge_harness.launch.scheduler.submission import read_submission
from converge_harness.launch.scheduler.submit import Submitter, cancel_all, prepare_plan
from converge_harness.model import Job, Plan, Role, RunRecord, RunStatus
from converge_harness.run_folder.layout import JOB, RECORD
from converge_harness.store import Store, read_json
from converge_harness.trainers import comes_in_passes


@dataclass(frozen=True, slots=True)
class Submitted:
    """The result of submitting a plan."""

    submitted: int = 0
    queued: int = 0
    """Jobs that were already in the scheduler."""
    reused: int = 0
    """Jobs that had already finished."""
    refused: tuple[RunRecord, ...] = ()
    """Records of jobs that the scheduler refuses, and of those that depend on them."""
    left: tuple[Job, ...] = ()
    """Jobs that have to be submitted by a later call."""
    why_left: str = ""
    again: tuple[str, ...] = ()
    """Ids of submitted jobs that were submitted before; on Kubernetes the old job has the same."""


def submit_plan(plan: Plan, site: Site, observer: Observer) -> Submitted:
    """Submit every job of a plan that has not finished and is not in the queue.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was submitted.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached.
        Interrupted: a signal came; what was submitted stays so.
    """
    with interruptible() as stop:
        prepared = prepare_plan(plan, site, observer, stop)
        submitter = Submitter(prepared, site, observer)
        records = prepared.records
        submitted = Submitted(queued=len(prepared.queued), reused=len(records))
        left = []
        for job in prepared.todo:
            stop.check()
            needed = records.get(job.needs) if job.needs else None
            given = None if submitter.busy else submitter.give(job, needed)
            if isinstance(given, RunRecord):
                records[job.identity] = given
                observer(Ended(time.time(), job, given))
            elif given is None:
                left.append(job)
        new = [records[job.identity] for job in prepared.todo if job.identity in records]
        why = submitter.busy or "another converge process is submitting them"
        return replace(
            submitted,
            submitted=len(submitter.ours),
            refused=tuple(record for record in new if record.status is not RunStatus.FINISHED),
            left=tuple(left),
            why_left=why if left else "",
            again=tuple(submitter.again),
        )


@dataclass(frozen=True, slots=True)
class Collected:
    """The results of a plan so far."""

    records: Mapping[str, RunRecord]
    """Records of all finished jobs, by identity."""
    left: tuple[JobStatus, ...]
    """The other jobs."""


def collect(plan: Plan, site: Site, observer: Observer) -> Collected:
    """Write the records of all finished jobs, and return which are not finished.

    Raises StoreError and ClusterError.
    """
    statuses, written = write_records(site, poll_lost(site, read_statuses(site, plan.jobs)))
    jobs = {job.identity: job for job in plan.jobs}
    for record in written:
        observer(Ended(time.time(), jobs[record.identity], record))
    for identity, each in statuses.items():
        if never := never_submitted(each, statuses):
            statuses[identity] = replace(each, record=never)
    records = {key: each.record for key, each in statuses.items() if each.record is not None}
    return Collected(records, tuple(each for each in statuses.values() if each.record is None))


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result of cancelling."""

    cancelled: tuple[RunRecord, ...]
    """Records of the jobs that are over now."""
    ending: tuple[JobStatus, ...]
    """Cancelled but not over yet."""
    unsure: tuple[JobStatus, ...]
    """Jobs that may or may not be in the scheduler; by their names there."""


def cancel(
    plan: Plan,
    site: Site,
    observer: Observer,
    *,
    wanted: Callable[[Job], bool],
    why: str,
    patience_s: float = 60.0,
) -> Cancelled:
    """Cancel jobs of a plan, and write the records of those that end in time.

    Raises:
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached.
        Interrupted: a signal came; the jobs are cancelled nevertheless.
    """
    statuses = read_statuses(site, plan.jobs)
    targets = {
        identity: replace(each, submission=replace(each.submission, cancelled=why))
        for identity, each in statuses.items()
        if each.in_queue and each.submission is not None and wanted(each.job)
    }
    given = {each.folder: each.submission for each in targets.values() if each.submission}
    if unwritten := cancel_all(site.backend, given):
        raise StoreError(f"cancelled, but this could not be recorded in run folders: {unwritten}")
    with interruptible() as stop:
        targets, records = _await_end({**statuses, **targets}, targets, site, stop, patience_s)
    for record in records:
        observer(Ended(time.time(), statuses[record.identity].job, record))
    unsure = (
        each
        for each in statuses.values()
        if each.submission is not None and each.state is None and wanted(each.job)
    )
    ending = tuple(each for each in targets.values() if each.record is None)
    return Cancelled(tuple(records), ending, tuple(unsure))


def _await_end(
    all_: Mapping[str, JobStatus],
    targets: Mapping[str, JobStatus],
    site: Site,
    stop: Interruption,
    patience_s: float,
) -> tuple[dict[str, JobStatus], list[RunRecord]]:
    """Write the targets' records as they end; seed-checkpoint jobs come first."""
    deadline = time.monotonic() + patience_s
    statuses = dict(all_)
    records: list[RunRecord] = []
    while True:
        left = {key: statuses[key] for key in targets if statuses[key].record is None}
        statuses |= poll_statuses(site.backend, left)
        chosen = {key: statuses[key] for key in statuses if _counts(statuses[key], targets)}
        after, written = write_records(site, chosen)
        statuses |= after
        records += written
        done = {key: statuses[key] for key in targets}
        if all(each.record is not None for each in done.values()) or time.monotonic() > deadline:
            return done, records
        stop.check()
        time.sleep(min(site.cluster.poll_s, 1.0))


def _counts(job_status: JobStatus, targets: Collection[str]) -> bool:
    """Whether it is a target, or a job from which a target may start."""
    return job_status.record is not None or job_status.job.identity in targets


NOT_SUBMITTED = "not submitted"
BROKEN_OFF = "submission interrupted"
"""States of our own; the second: converge ended before it knew the job's id."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """The row of a job in ``converge status``."""

    name: str
    role: Role
    job_id: str
    state: str
    """``pending``, ``running``, how it ended, or one of the two states above."""
    reason: str
    step: int | None
    steps: int
    loss: float | None
    elapsed_s: float | None
    nodes: str
    requeues: int = 0
    """How often the scheduler restarted it; ``elapsed_s`` then counts from its last start."""
    recorded: bool = True
    """False for a job that has ended but has no record yet, which ``collect`` will write."""


def status(plan: Plan, site: Site) -> tuple[StatusRow, ...]:
    """The status of every job of a plan, in the plan's order. Writes nothing.

    Raises StoreError and ClusterError.
    """
    statuses = read_statuses(site, plan.jobs)
    orphans = _orphans(site.store)
    by_hand = " ".join(site.backend.cancel_argv(site.cluster))
    foreseen: dict[str, JobStatus] = {}
    rows = {}
    for identity, job_status in statuses.items():
        known = known_of(site, job_status, record_of_needed(job_status.job, foreseen))
        over = result_of(known) if known is not None else never_submitted(job_status, foreseen)
        foreseen[identity] = replace(job_status, record=job_status.record or over)
        rows[identity] = _row(job_status, over, orphans, by_hand)
    return tuple(replace(rows[job.identity], name=job.name) for job in plan.jobs)


def _orphans(store: Store) -> dict[str, str]:
    """Ids of submitted jobs without a record, by their names.

    A job of the plan may be among them under an older identity.
    """
    found = {}
    for folder in store.run_folders().values():
        if (folder / RECORD).is_file():
            continue
        with suppress(StoreError):  # perhaps of another plan, whose own command will report it
            if submission := read_submission(folder):
                name = str(read_json(folder / JOB).get("name"))
                found[name] = submission.job_id or submission.name
    return found


def _row(
    job_status: JobStatus, over: RunRecord | None, orphans: Mapping[str, str], by_hand: str
) -> StatusRow:
    """``by_hand`` is the command that cancels a job, without its id."""
    job, state, submission = job_status.job, job_status.state, job_status.submission
    record = job_status.record or over
    last = last_line(job_status.folder, in_passes=comes_in_passes(job))
    reason = state.reason if state is not None else ""
    if record is not None:
        word = str(record.status)
        reason = record.error.message if record.error else ""
    elif state is None:
        word = NOT_SUBMITTED if submission is None else BROKEN_OFF
        before = orphans.get(job.name) if submission is None else None
        if before is not None:
            reason = (
                f"job {before} of this name belongs to another experiment, or to this one before a "
                "change (of the file, converge, or installed packages); if it is not "
                f"needed any more: {by_hand} {before}"
            )
    else:
        word = str(state.phase) if state.phase is not Phase.ENDED else state.word.lower()
    started = state is not None and state.phase is Phase.RUNNING
    return StatusRow(
        name=job.name,
        role=job.role,
        job_id=(submission.job_id or "") if submission else "",
        state=word,
        reason=reason,
        step=last.step if last else None,
        steps=job.steps,
        loss=last.loss if last else None,
        elapsed_s=record.wall_s if record else state.ran_s if started and state else None,
        nodes=state.nodes if state is not None else "",
        requeues=record.requeues if record else state.restarts if state else 0,
        recorded=over is None or submission is None,
    )
