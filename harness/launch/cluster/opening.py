"""What there is to do when a plan is begun on a cluster, or gone on with."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.errors import ClusterError
from harness.launch.check import check_jobs, count_of, unchecked
from harness.launch.cluster.standing import (
    Site,
    Standing,
    ask,
    look,
    look_again,
    names_of,
    script_of,
    settle_all,
)
from harness.launch.events import Ended, Notice, Observer, Preparing, Reused
from harness.launch.interruption import Interruption
from harness.launch.local import require_seed_checkpoints
from harness.launch.warm import WarmServers
from harness.model import Job, Plan, RunRecord, RunStatus
from harness.seal import stale
from harness.trainers import Resources, environment

_DYING_S = 120.0
"""Longest wait for jobs that a harness has cancelled; Slurm kills after ``KillWait``, 30 s."""
_DYING_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Opening:
    """What there is to do when a plan is begun, or gone on with."""

    standings: dict[str, Standing]
    """Of all jobs, by identity, after what was over has been settled."""
    todo: tuple[Job, ...]
    """Jobs to be submitted, in the plan's order."""

    @property
    def records(self) -> dict[str, RunRecord]:
        """Of the jobs that are not to run again, by identity."""
        again = {job.identity for job in self.todo}
        return {
            identity: each.record
            for identity, each in self.standings.items()
            if each.record is not None and identity not in again
        }

    @property
    def queued(self) -> dict[str, Standing]:
        """The jobs that the scheduler has, by identity."""
        return {identity: each for identity, each in self.standings.items() if each.in_queue}


def open_plan(plan: Plan, site: Site, observer: Observer, stop: Interruption) -> Opening:
    """See what has finished and what is in the queue, settle what is over, and check the rest.

    A job runs again if it has failed, as everywhere in converge, and if its evidence or something
    that it was made of has changed since.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was submitted.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        ClusterError: the scheduler cannot be reached.
        Interrupted: a signal came.
    """
    site.store.require_writable()
    standings = _await_dying(look(site, plan.jobs), site, observer, stop)
    standings, settled = settle_all(site, look_again(site, standings, stop.check))
    for record in settled:
        if record.status is not RunStatus.FINISHED:
            observer(Ended(time.time(), standings[record.identity].job, record))
    fresh = site.options.fresh
    todo = []
    for identity, standing in standings.items():
        if standing.in_queue:
            continue
        if standing.record is None or not standing.finished or fresh:
            todo.append(standing.job)
            continue
        if why := stale(standing.record):
            observer(Notice(time.time(), f"{standing.job.name} runs again: {why}"))
            todo.append(standing.job)
            continue
        record = replace(standing.record, reused=True)
        standings[identity] = replace(standing, record=record)
        observer(Reused(time.time(), standing.job, record))
    opening = Opening(standings, tuple(todo))
    _say_what_runs_again(todo, standings, observer)
    queued = [each.job for each in opening.queued.values()]
    require_seed_checkpoints((*queued, *todo), opening.records, site.store)
    for job in todo:
        script_of(job, standings[job.identity].folder, site)  # what cannot be said is said now
    _check(todo, site, observer, stop)
    return opening


def _say_what_runs_again(
    todo: Sequence[Job], standings: Mapping[str, Standing], observer: Observer
) -> None:
    by_status: dict[RunStatus, list[Job]] = {}
    for job in todo:
        record = standings[job.identity].record
        if record is not None and record.status is not RunStatus.FINISHED:
            by_status.setdefault(record.status, []).append(job)
    for status, jobs in by_status.items():
        observer(Notice(time.time(), f"runs again: {names_of(jobs)} ({status} before)"))


def _await_dying(
    standings: dict[str, Standing], site: Site, observer: Observer, stop: Interruption
) -> dict[str, Standing]:
    """Wait for jobs that were cancelled to be over: they are to run again, in the same folders."""
    deadline = time.monotonic() + _DYING_S
    told = False
    while dying := [each.job for each in standings.values() if each.is_dying]:
        if not told:
            observer(Preparing(time.time(), f"waiting for what was cancelled: {names_of(dying)}"))
            told = True
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{names_of(dying)}: cancelled, and still not over; see squeue, and give the same "
                "command again later"
            )
        stop.check()
        time.sleep(min(_DYING_POLL_S, site.cluster.poll_s))
        standings = ask(site.backend, standings)
    return standings


def _check(jobs: Sequence[Job], site: Site, observer: Observer, stop: Interruption) -> None:
    """Have the toolchains, which are on this machine too, build the configs of jobs."""
    to_check = unchecked(jobs, site.store) if site.options.check else ()
    if not to_check:
        return
    observer(Preparing(time.time(), f"checking {count_of(to_check)}"))
    inherited, device = dict(os.environ), site.options.device
    servers = WarmServers(environment(inherited, Resources(device=device)), device)
    try:
        check_jobs(to_check, site.store, site.options, inherited, servers, stop)
    finally:
        servers.close()
