"""A plan on a cluster without a harness that stays: submit, collect, cancel.

All of it finds jobs by the identities of the plan in the store, from any later shell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from harness.errors import StoreError
from harness.launch.cluster.cancelling import cancel_all
from harness.launch.cluster.opening import open_plan
from harness.launch.cluster.standing import (
    Site,
    Standing,
    ask,
    look,
    look_again,
    never_submitted,
    settle_all,
)
from harness.launch.cluster.submitting import Submitter
from harness.launch.events import Ended, Observer
from harness.launch.interruption import Interruption, interruptible
from harness.model import Job, Plan, RunRecord, RunStatus


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
        if never := never_submitted(each, standings):
            standings[identity] = replace(each, record=never)
    records = {key: each.record for key, each in standings.items() if each.record is not None}
    return Collected(records, tuple(each for each in standings.values() if each.record is None))


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
    given = {each.folder: each.submission for each in targets.values() if each.submission}
    if untold := cancel_all(site.backend, given):
        raise StoreError(f"cancelled, which run folders do not say: {untold}")
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
