"""A plan on a cluster without a harness that stays: submit, see, collect, cancel.

All of it finds jobs by the identities of the plan in the store, from any later shell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from harness.errors import StoreError
from harness.launch.cluster.backend import Phase
from harness.launch.cluster.settle import settle, skipped
from harness.launch.cluster.standing import (
    Site,
    Standing,
    ask,
    known_of,
    look,
    look_again,
    needed_record,
    settle_all,
)
from harness.launch.cluster.submission import Submission, read_submission, write_submission
from harness.launch.cluster.submitting import Submitter, open_plan
from harness.launch.events import Ended, Observer
from harness.launch.interruption import Interruption, interruptible
from harness.launch.progress import last_line
from harness.model import Job, Plan, Role, RunRecord, RunStatus
from harness.store import Store, slug
from harness.trainers import comes_in_passes


@dataclass(frozen=True, slots=True)
class Handed:
    """What came of submitting a plan."""

    submitted: int = 0
    queued: int = 0
    """Jobs that the scheduler had before."""
    reused: int = 0
    """Jobs that have finished before."""
    refused: tuple[RunRecord, ...] = ()
    """Records of jobs that the scheduler does not take, and of those that start from them."""
    left: tuple[Job, ...] = ()
    """Jobs that are to be submitted by another call."""
    why_left: str = ""


def submit_plan(plan: Plan, site: Site, observer: Observer) -> Handed:
    """Submit every job of a plan that has not finished and is not in the queue.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was submitted.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached.
        Interrupted: a signal came; what was submitted stays so.
    """
    with interruptible() as stop:
        opening = open_plan(plan, site, observer, stop)
        submitter = Submitter(opening, site, observer)
        records = opening.records
        handed = Handed(queued=len(opening.queued), reused=len(records))
        left = []
        for job in opening.todo:
            stop.check()
            needed = records.get(job.needs) if job.needs else None
            given = None if submitter.busy else submitter.give(job, needed)
            if isinstance(given, RunRecord):
                records[job.identity] = given
                observer(Ended(time.time(), job, given))
            elif given is None:
                left.append(job)
        new = [records[job.identity] for job in opening.todo if job.identity in records]
        why = submitter.busy or "another harness is at them"
        return replace(
            handed,
            submitted=len(submitter.ours),
            refused=tuple(record for record in new if record.status is not RunStatus.FINISHED),
            left=tuple(left),
            why_left=why if left else "",
        )


@dataclass(frozen=True, slots=True)
class Row:
    """What a person wants to know of a job."""

    name: str
    role: Role
    job_id: str
    state: str
    """``not submitted``, ``pending``, ``running``, or how it ended."""
    reason: str
    step: int | None
    steps: int
    loss: float | None
    elapsed_s: float | None
    nodes: str
    requeues: int = 0
    """How often the scheduler began it again; ``elapsed_s`` is then that of its last life."""
    settled: bool = True
    """False for what has ended and has no record yet: ``collect`` writes it."""


def status(plan: Plan, site: Site) -> tuple[Row, ...]:
    """How every job of a plan stands, in the plan's order. Nothing is written.

    Raises StoreError and ClusterError.
    """
    standings = look(site, plan.jobs)
    orphans = _orphans(site.store)
    foreseen: dict[str, Standing] = {}
    rows = {}
    for identity, standing in standings.items():
        known = known_of(site, standing, needed_record(standing.job, foreseen))
        over = settle(known) if known is not None else _never_submitted(standing, foreseen)
        foreseen[identity] = replace(standing, record=standing.record or over)
        rows[identity] = _row(standing, over, orphans)
    return tuple(replace(rows[job.identity], name=job.name) for job in plan.jobs)


@dataclass(frozen=True, slots=True)
class Collected:
    """What has come of a plan so far."""

    records: Mapping[str, RunRecord]
    """Of all jobs that are over, by identity."""
    left: tuple[Standing, ...]
    """The others."""


def collect(plan: Plan, site: Site, observer: Observer) -> Collected:
    """Write the records of all that is over, and say what is not.

    Raises StoreError and ClusterError.
    """
    standings, settled = settle_all(site, look_again(site, look(site, plan.jobs)))
    jobs = {job.identity: job for job in plan.jobs}
    for record in settled:
        observer(Ended(time.time(), jobs[record.identity], record))
    for identity, each in standings.items():
        if never := _never_submitted(each, standings):
            standings[identity] = replace(each, record=never)
    records = {key: each.record for key, each in standings.items() if each.record is not None}
    return Collected(records, tuple(each for each in standings.values() if each.record is None))


def _never_submitted(standing: Standing, standings: Mapping[str, Standing]) -> RunRecord | None:
    """The record of a job that needs not be submitted: what it needs did not finish."""
    needed = needed_record(standing.job, standings)
    if standing.record is not None or standing.submission is not None or needed is None:
        return None
    if needed.status is RunStatus.FINISHED:
        return None
    return skipped(standing.job, standing.folder, needed)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What came of cancelling."""

    cancelled: tuple[RunRecord, ...]
    """Of the jobs that are over now."""
    ending: tuple[Standing, ...]
    """Cancelled, and not over yet."""
    unsure: tuple[Standing, ...]
    """Jobs of which only the scheduler knows whether it has them; by their names there."""


def cancel(
    plan: Plan,
    site: Site,
    observer: Observer,
    *,
    wanted: Callable[[Job], bool],
    why: str,
    patience_s: float = 60.0,
) -> Cancelled:
    """Take jobs of a plan out of the scheduler's hands, and settle those that are over in time.

    Raises:
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached.
        Interrupted: a signal came; the jobs are cancelled all the same.
    """
    standings = look(site, plan.jobs)
    targets = {
        identity: replace(each, submission=replace(each.submission, cancelled=why))
        for identity, each in standings.items()
        if each.in_queue and each.submission is not None and wanted(each.job)
    }
    unwritten: list[StoreError] = []
    for each in targets.values():
        if each.submission is not None:
            try:
                write_submission(each.folder, each.submission)
            except StoreError as error:  # no reason to let them run
                unwritten.append(error)
    site.backend.cancel(_ids(targets.values()))
    if unwritten:
        raise StoreError(f"cancelled, which run folders do not say: {unwritten[0]}")
    with interruptible() as stop:
        targets, records = _await_end({**standings, **targets}, targets, site, stop, patience_s)
    for record in records:
        observer(Ended(time.time(), standings[record.identity].job, record))
    unsure = (
        each
        for each in standings.values()
        if each.submission is not None and each.state is None and wanted(each.job)
    )
    ending = tuple(each for each in targets.values() if each.record is None)
    return Cancelled(tuple(records), ending, tuple(unsure))


def _await_end(
    all_: Mapping[str, Standing],
    targets: Mapping[str, Standing],
    site: Site,
    stop: Interruption,
    patience_s: float,
) -> tuple[dict[str, Standing], list[RunRecord]]:
    """Settle the targets as they end, with the records of what they start from at hand."""
    deadline = time.monotonic() + patience_s
    standings = dict(all_)
    records: list[RunRecord] = []
    while True:
        left = {key: standings[key] for key in targets if standings[key].record is None}
        standings |= ask(site.backend, left)
        chosen = {key: standings[key] for key in standings if _counts(standings[key], targets)}
        after, settled = settle_all(site, chosen)
        standings |= after
        records += settled
        done = {key: standings[key] for key in targets}
        if all(each.record is not None for each in done.values()) or time.monotonic() > deadline:
            return done, records
        stop.check()
        time.sleep(min(site.cluster.poll_s, 1.0))


def _counts(standing: Standing, targets: Collection[str]) -> bool:
    """Whether it is a target, or the record of something that a target may start from."""
    return standing.record is not None or standing.job.identity in targets


def _ids(standings: Collection[Standing]) -> tuple[str, ...]:
    submissions: list[Submission | None] = [each.submission for each in standings]
    return tuple(each.job_id for each in submissions if each is not None and each.job_id)


def _orphans(store: Store) -> dict[str, str]:
    """Ids of submitted jobs that have no record, by the names of their folders but the identity.

    A job of a plan whose folder has another identity is one of those as they were meant before.
    """
    found = {}
    for folder in store.run_folders().values():
        if (folder / "record.json").is_file():
            continue
        with suppress(StoreError):  # of another plan, perhaps: whose turn it is, will say so
            if submission := read_submission(folder):
                found[folder.name.rpartition("-")[0]] = submission.job_id or submission.name
    return found


def _row(standing: Standing, over: RunRecord | None, orphans: Mapping[str, str]) -> Row:
    job, state, submission = standing.job, standing.state, standing.submission
    record = standing.record or over
    last = last_line(standing.folder, in_passes=comes_in_passes(job))
    reason = state.reason if state is not None else ""
    if record is not None:
        word = str(record.status)
        reason = record.error.message if record.error else ""
    elif state is None:
        word = "not submitted" if submission is None else "submission interrupted"
        before = orphans.get(slug(job.name)) if submission is None else None
        if before is not None:
            reason = (
                f"job {before} of this name is another: of another experiment, or what it means "
                "has changed since (the file, converge, or what is installed); if nobody wants it "
                f"any more: scancel {before}"
            )
    else:
        word = str(state.phase) if state.phase is not Phase.ENDED else state.word.lower()
    started = state is not None and state.phase is Phase.RUNNING
    return Row(
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
        settled=over is None or submission is None,
    )
