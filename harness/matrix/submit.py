"""Jobs of a scheduler, without waiting for them: submit, status, collect, cancel."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.launch.events import Observer
from converge_harness.launch.kubernetes.written import WrittenObjects
from converge_harness.launch.scheduler import detached
from converge_harness.launch.scheduler.detached import (
    BROKEN_OFF,
    NOT_SUBMITTED,
    Cancelled,
    Collected,
    StatusRow,
    Submitted,
)
from converge_harness.launch.scheduler.job_status import JobStatus
from converge_harness.matrix.run import (
    Ran,
    baseline_record,
    options_of,
    prepare,
    prepare_data,
    site_of,
)
from converge_harness.model import Job, Plan, RankError, RunRecord, RunStatus
from converge_harness.plan import select
from converge_harness.store import Store


def submit_jobs(
    plan: Plan,
    store: Store,
    observer: Observer,
    *,
    fresh: bool = False,
    objects: Path | None = None,
) -> Submitted:
    """Submit every job that has not finished and is not in the queue.

    Jobs of Kubernetes are written into the folder ``objects``, for somebody to create.

    Raises what ``converge_harness.launch.scheduler.detached.submit_plan`` raises.
    """
    data = prepare(plan, store, observer)
    site = site_of(plan, store, options_of(plan, data, fresh=fresh), observer, objects)
    submitted = detached.submit_plan(plan.without_baseline, site, observer)
    if isinstance(site.backend, WrittenObjects):
        site.backend.tidy()
    return submitted


def jobs_status(plan: Plan, store: Store, observer: Observer) -> tuple[StatusRow, ...]:
    """The status of every job, in the plan's order. Nothing is written."""
    site = site_of(plan, store, options_of(plan, {}), observer)
    return detached.status(plan.without_baseline, site)


def collect_jobs(plan: Plan, store: Store, observer: Observer) -> Collected:
    """Write the records of all jobs that have ended, and return which have not."""
    site = site_of(plan, store, options_of(plan, {}), observer)
    return detached.collect(plan.without_baseline, site, observer)


def collected_run(plan: Plan, collected: Collected, store: Store) -> Ran:
    """The records of collected jobs; those that have not ended count as skipped."""
    records = {each.job.identity: _not_over(each) for each in collected.left}
    records.update(collected.records)
    baselines = (job for job in plan.jobs if job.baseline is not None)
    records.update((job.identity, baseline_record(job)) for job in baselines)
    return Ran(tuple(records[job.identity] for job in plan.jobs), prepare_data(plan, store))


def cancel_jobs(
    plan: Plan, store: Store, observer: Observer, only: Sequence[str] = ()
) -> Cancelled:
    """Cancel the jobs that ``only`` names (none: all).

    Raises ConfigError for a name that is neither a job's nor a set's.
    """
    wanted = jobs_named(plan, only)
    return detached.cancel(
        plan.without_baseline,
        site_of(plan, store, options_of(plan, {}), observer),
        observer,
        wanted=wanted,
        why=f"cancelled by converge cancel ({_who()})",
    )


def jobs_named(plan: Plan, only: Sequence[str]) -> Callable[[Job], bool]:
    """The jobs of ``--only``: jobs by name, test sets as in other commands."""
    # In the plan's order.
    by_name = dict.fromkeys(job.name for job in plan.without_baseline.jobs)
    only = only or tuple(by_name)
    sets = [name for name in only if name not in by_name]
    unknown = [name for name in sets if not _is_set(plan, name)]
    if unknown:
        valid = list(dict.fromkeys((*by_name, *(spec.name for spec in plan.experiment.tests))))
        path = str(plan.experiment.path)
        raise ConfigError(
            [Problem(path, f"no job or set {each!r}", suggest(each, valid)) for each in unknown]
        )
    chosen = {name for name in only if name in by_name}
    if sets:
        chosen |= {spec.name for spec in select(plan.experiment, sets).tests}
    return lambda job: job.name in chosen


def state_of(status: JobStatus) -> str:
    """``pending as job 12 (Priority)``."""
    if status.submission is None:
        return NOT_SUBMITTED
    if status.state is None:
        return BROKEN_OFF
    reason = f" ({status.state.reason})" if status.state.reason else ""
    return f"{status.state.phase} as job {status.submission.job_id}{reason}"


def _is_set(plan: Plan, name: str) -> bool:
    """Whether `select` knows it: a set, or a table from which several are generated."""
    try:
        select(plan.experiment, [name])
    except ConfigError:
        return False
    return True


def _not_over(status: JobStatus) -> RunRecord:
    """The record of a job that has not ended, for judging."""
    return RunRecord(
        name=status.job.name,
        identity=status.job.identity,
        folder=status.folder,
        status=RunStatus.SKIPPED,
        wall_s=0.0,
        argv=(),
        error=RankError(None, f"not ended: {state_of(status)}"),
    )


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        user = "somebody"
    return f"{user} on {socket.gethostname()}"
