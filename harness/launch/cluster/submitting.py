"""Gives the jobs of a plan to a scheduler: run folder, script, what it waits for, each once."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import StoreError
from harness.launch.cluster.backend import JobState, Phase, Refused, Request
from harness.launch.cluster.batch import JOB_SCRIPT, job_name
from harness.launch.cluster.lanes import lanes_of
from harness.launch.cluster.opening import Opening
from harness.launch.cluster.refusals import with_keys
from harness.launch.cluster.settle import Known, facts, has_ended, skipped
from harness.launch.cluster.standing import Site, look, script_of, settle_all
from harness.launch.cluster.submission import Submission, read_submission, write_submission
from harness.launch.events import Observer, Queued, Waiting
from harness.model import Job, RankError, RunRecord, RunStatus
from harness.run_folder.layout import RECORD, seed_checkpoint_of
from harness.store import atomic_write, read_record
from harness.trainers import job_payload


class Submitter:
    """Gives jobs to the scheduler, one by one, in the plan's order."""

    def __init__(self, opening: Opening, site: Site, observer: Observer) -> None:
        self._site = site
        self._tell = observer
        self._before = dict(opening.standings)
        self._folders = {identity: each.folder for identity, each in opening.standings.items()}
        queued = [each.submission for each in opening.queued.values() if each.submission]
        self._ids = {each.identity: each.job_id for each in queued if each.job_id is not None}
        self._elsewhere: set[str] = set()
        self._settled: dict[str, RunRecord] = {}
        self.lanes = lanes_of(site.cluster.max_jobs, queued)
        self.busy = ""
        """Why the scheduler takes no job for now; empty: it does."""
        self.ours: set[str] = set()
        """Identities of the jobs that this process has submitted."""

    def folder_of(self, job: Job) -> Path:
        """Its run folder, whether it is there or not."""
        return self._folders[job.identity]

    def give(self, job: Job, needed: RunRecord | None) -> Submission | RunRecord | None:
        """Submit a job; its record where there is one without, None where it is to be tried again.

        That is: another harness is at it, the scheduler takes no more for now (``busy``), or the
        job whose weights it needs has not been submitted yet. ``needed`` is that job's record, None
        while it has none.

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
                self._tell(Waiting(time.time(), job))
            return None
        try:
            return self._of_another(job) or self._submit(job, needed)
        finally:
            lock.release()

    def _over_meanwhile(self, identity: str) -> RunRecord | None:
        """The record of a job that has ended since it was seen in the queue; else None.

        A scheduler soon forgets it, and then starts no job that waits for it to end well.
        """
        if identity not in self._settled and has_ended(self._folders[identity]):
            standing = look(self._site, [self._before[identity].job])
            after, _ = settle_all(self._site, standing)
            if (record := after[identity].record) is not None:
                self._settled[identity] = record
        return self._settled.get(identity)

    def _of_another(self, job: Job) -> Submission | RunRecord | None:
        """What another harness made of the job since this one looked."""
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
            return before.submission  # it was there, and is over
        # The folder of a job that may be running must not be cleaned; it was prepared for the same
        # identity, and so with the same content.
        self._prepare(job, folder, needed, clean=not perhaps_there)
        wanted = job.needs if job.needs is not None and needed is None else None
        request = Request(
            script=folder / JOB_SCRIPT,
            name=job_name(job),
            after_ok=(self._ids[wanted],) if wanted is not None else (),
            after_any=self.lanes.waits_for(),
            perhaps_there=perhaps_there,
        )
        submission = Submission(
            identity=job.identity,
            name=request.name,
            submitted=datetime.now(UTC).isoformat(timespec="milliseconds"),
            after_ok=request.after_ok,
            after_any=request.after_any,
            uid=os.getuid(),
        )
        write_submission(folder, submission)
        # It stays so: an answer that was lost may have been a yes.
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
            self._site.backend.cancel([job_id])  # nobody would follow it
            raise
        self.ours.add(job.identity)
        self._note(job, job_id)
        self._tell(Queued(time.time(), job, job_id))
        return submission

    def _note(self, job: Job, job_id: str) -> None:
        self._ids[job.identity] = job_id
        self.lanes.add(job_id)

    def _prepare(self, job: Job, folder: Path, needed: RunRecord | None, *, clean: bool) -> None:
        site, options = self._site, self._site.options
        seed = job.starts_from
        if job.needs is not None:
            seed = seed_checkpoint_of(needed.folder if needed else self._folders[job.needs])
        payload = job_payload(
            job,
            folder,
            data=options.data_of(job),
            seed_checkpoint=seed,
            device=site.cluster.device,
        )
        if clean:
            site.store.start_run(folder, payload)
        atomic_write(folder / JOB_SCRIPT, script_of(job, folder, site).encode())

    def _refused(self, job: Job, folder: Path, submission: Submission, words: str) -> RunRecord:
        known = Known(
            job, folder, submission, JobState(Phase.ENDED, word="REFUSED"), self._site.cluster
        )
        record = RunRecord(
            name=job.name,
            identity=job.identity,
            folder=folder,
            status=RunStatus.REFUSED,
            wall_s=0.0,
            argv=known.argv,
            error=RankError(None, with_keys(words, self._site.cluster)),
        )
        return self._site.store.finish_run(record, facts(known))
