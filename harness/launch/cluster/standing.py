"""Where every job of a plan stands: its record, else what its scheduler says; by one query."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import ClusterError
from harness.launch.cluster.backend import Backend, JobState, Phase
from harness.launch.cluster.batch import batch_script
from harness.launch.cluster.settle import Known, facts, has_ended, settle, skipped
from harness.launch.cluster.submission import Submission, read_submission
from harness.launch.options import RunOptions
from harness.model import Cluster, Experiment, Job, RunRecord, RunStatus
from harness.run_folder.layout import RECORD
from harness.store import Store, folder_key, read_record
from harness.trainers import is_complete

UNKNOWN_LOOKS = 3
"""So often in a row nobody may know of a job before it is believed to be lost."""
_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where all jobs of a matrix are submitted, and how."""

    store: Store
    backend: Backend
    cluster: Cluster
    experiment: Experiment
    options: RunOptions


@dataclass(frozen=True, slots=True)
class Standing:
    """One job as its run folder and the scheduler have it."""

    job: Job
    folder: Path
    """The run folder, whether it is there or not."""
    record: RunRecord | None = None
    """Of a run that is over and settled."""
    submission: Submission | None = None
    """Of a job without a record: it is in the scheduler's hands, or was."""
    state: JobState | None = None
    """What the scheduler says; None where it was not asked."""

    @property
    def finished(self) -> bool:
        """Whether it left what it was run for: then it can be taken as it is."""
        record = self.record
        return (
            record is not None
            and record.status is RunStatus.FINISHED
            and is_complete(self.job, record.folder)
        )

    @property
    def in_queue(self) -> bool:
        """Whether the scheduler has it and will run it, or does."""
        state = self.state
        return (
            state is not None and state.phase in (Phase.PENDING, Phase.RUNNING) and not state.never
        )

    @property
    def is_dying(self) -> bool:
        """Whether a harness has cancelled it, and it is not over yet."""
        return self.in_queue and self.submission is not None and bool(self.submission.cancelled)


def script_of(job: Job, folder: Path, site: Site) -> str:
    """The batch script of a job. Raises ConfigError as ``batch_script`` does."""
    return batch_script(
        job,
        folder,
        site.cluster,
        experiment=site.experiment.name,
        rank_module=site.options.rank_module,
    )


def look(site: Site, jobs: Iterable[Job]) -> dict[str, Standing]:
    """Where jobs stand, by identity and in their order. Nothing is written.

    Raises:
        StoreError: a file in a run folder is damaged or of a newer schema.
        ClusterError: the scheduler cannot be reached. It is asked only if it has some of the jobs.
    """
    folders = site.store.run_folders()
    standings = {job.identity: _on_disk(site.store, job, folders) for job in jobs}
    return ask(site.backend, standings)


def ask(backend: Backend, standings: Mapping[str, Standing]) -> dict[str, Standing]:
    """The same jobs with what the scheduler says of them now.

    Raises ClusterError when it cannot be reached, and when it would have to tell of another user's
    jobs and does not: they may well run.
    """
    ids = [id_ for each in standings.values() if (id_ := _job_id(each)) is not None]
    states = backend.poll(ids) if ids else {}
    asked = {
        identity: replace(each, state=_state(each, states)) for identity, each in standings.items()
    }
    hidden = [each for each in asked.values() if _is_hidden(each)]
    if hidden and hidden[0].submission is not None:
        raise ClusterError(
            f"{names_of([each.job for each in hidden])}: submitted by user number "
            f"{hidden[0].submission.uid}, whose jobs the scheduler does not show to you; let that "
            "user give the command, or use another --store"
        )
    return asked


def look_again(
    site: Site, standings: Mapping[str, Standing], stop: Callable[[], None] = lambda: None
) -> dict[str, Standing]:
    """The same jobs, after more looks at those that nobody knows: one empty answer may be wrong.

    Where the script has left its end, that is enough. ``stop`` is called between looks.

    Raises ClusterError as ``ask`` does, and whatever ``stop`` raises.
    """
    looked = dict(standings)
    for _ in range(UNKNOWN_LOOKS - 1):
        lost = {identity: each for identity, each in looked.items() if _is_lost(each)}
        if not lost:
            break
        stop()
        time.sleep(min(site.cluster.poll_s, _AGAIN_S))
        looked |= ask(site.backend, lost)
    return looked


def _is_lost(standing: Standing) -> bool:
    unknown = standing.state is not None and standing.state.phase is Phase.UNKNOWN
    return unknown and not has_ended(standing.folder)


def state_of(submission: Submission, states: Mapping[str, JobState]) -> JobState:
    """What a poll told of a submitted job; unknown, too, when its id is another job's by now."""
    state = states.get(submission.job_id or "", JobState(Phase.UNKNOWN))
    is_another = state.name not in ("", submission.name)
    return JobState(Phase.UNKNOWN) if is_another else state


def _is_hidden(standing: Standing) -> bool:
    submission, state = standing.submission, standing.state
    if submission is None or submission.uid in (None, os.getuid()):
        return False
    unknown = state is None or state.phase is Phase.UNKNOWN
    return unknown and not has_ended(standing.folder)


def known_of(site: Site, standing: Standing, needed: RunRecord | None) -> Known | None:
    """What ``settle`` wants to know; None when the job is in nobody's hands."""
    if standing.submission is None or standing.state is None:
        return None
    return Known(
        job=standing.job,
        folder=standing.folder,
        submission=standing.submission,
        state=standing.state,
        cluster=site.cluster,
        needed=needed,
    )


def conclude(site: Site, known: Known) -> RunRecord | None:
    """Write the record of a job that is over; None when it is not, or not for us to say now.

    A job that will never start is taken out of the queue first: with a record nobody would look
    for it there. Two harnesses may follow the same job: the first one's record holds.

    Raises StoreError when the record cannot be written, and ClusterError when the job that never
    starts cannot be cancelled.
    """
    if settle(known) is None:
        return None
    lock = site.store.lock(known.job.identity)
    if not lock.acquire():
        return None
    try:
        if (known.folder / RECORD).is_file():
            return replace(read_record(known.folder), name=known.job.name)
        current = read_submission(known.folder)
        if current is not None:  # None: somebody has deleted the run folder
            if current.job_id != known.submission.job_id:
                return None  # submitted anew by another harness
            if current.cancelled:  # by another harness, perhaps
                known = replace(known, submission=current)
        if known.state.never and known.submission.job_id is not None:
            site.backend.cancel([known.submission.job_id])
        record = settle(known)
        if record is not None:
            record = site.store.finish_run(record, facts(known))
        return record
    finally:
        lock.release()


def settle_all(
    site: Site, standings: Mapping[str, Standing]
) -> tuple[dict[str, Standing], list[RunRecord]]:
    """Write the records of all jobs that are over; with what was settled now.

    Jobs come after what they need, as in a plan.
    """
    after = dict(standings)
    settled = []
    for identity, standing in standings.items():
        needed = needed_record(standing.job, after)
        known = known_of(site, standing, needed)
        record = conclude(site, known) if known is not None else None
        if record is not None:
            after[identity] = replace(standing, record=record, submission=None, state=None)
            settled.append(record)
    return after, settled


def needed_record(job: Job, standings: Mapping[str, Standing]) -> RunRecord | None:
    """The record of the seed-checkpoint job that a job starts from, if it has one."""
    needed = standings.get(job.needs) if job.needs else None
    return needed.record if needed else None


def never_submitted(standing: Standing, standings: Mapping[str, Standing]) -> RunRecord | None:
    """The record of a job that needs not be submitted: what it needs did not finish."""
    needed = needed_record(standing.job, standings)
    if standing.record is not None or standing.submission is not None or needed is None:
        return None
    if needed.status is RunStatus.FINISHED:
        return None
    return skipped(standing.job, standing.folder, needed)


def names_of(jobs: Sequence[Job], most: int = 5) -> str:
    """``a, b and 3 more``."""
    shown = ", ".join(job.name for job in jobs[:most])
    return f"{shown} and {len(jobs) - most} more" if len(jobs) > most else shown


def _on_disk(store: Store, job: Job, folders: Mapping[str, Path]) -> Standing:
    folder = folders.get(folder_key(job.identity))
    if folder is None:
        return Standing(job, store.run_folder(job.name, job.identity).absolute())
    folder = folder.absolute()
    if (folder / RECORD).is_file():
        record = read_record(folder)
        if record.identity == job.identity:
            return Standing(job, folder, record=replace(record, name=job.name))
    submission = read_submission(folder)
    if submission is not None and submission.identity != job.identity:
        submission = None  # as with records: a folder that was copied tells of another job
    return Standing(job, folder, submission=submission)


def _job_id(standing: Standing) -> str | None:
    return standing.submission.job_id if standing.submission else None


def _state(standing: Standing, states: Mapping[str, JobState]) -> JobState | None:
    if standing.submission is None:
        return None
    if standing.submission.job_id is None:
        # The harness died before it knew the id. Where the script has ended, that is enough.
        ended = has_ended(standing.folder)
        return JobState(Phase.UNKNOWN) if ended else None
    return state_of(standing.submission, states)
