"""The loop that starts, follows and ends jobs: one thread, and no process left when it is left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.launch import processes
from harness.launch.events import (
    Ended,
    GoingOn,
    Notice,
    Observer,
    Overview,
    Retrying,
    Started,
    Step,
    Waiting,
)
from harness.launch.interruption import Interruption
from harness.launch.progress import Pace, matrix_eta_s
from harness.launch.run import Run
from harness.launch.script import due
from harness.launch.slots import Slots, launch_order
from harness.launch.start import Place, go_on, start_run
from harness.launch.strike import settle, strike
from harness.model import Experiment, Job, RankError, RunRecord, RunStatus
from harness.run_folder.layout import seed_checkpoint_of
from harness.seal import stale
from harness.store import RunLock
from harness.trainers import comes_in_passes, trainer_of
from harness.trainers.failure import is_infrastructure_fault

MAX_ATTEMPTS = 2
_OVERVIEW_S = 1.0


class Supervisor:
    """Brings pending jobs to records; ``run`` is called once."""

    def __init__(
        self, experiment: Experiment, place: Place, slots: Slots, observer: Observer
    ) -> None:
        self._experiment = experiment
        self._place = place
        self._slots = slots
        self._slot_count = len(slots.free)
        self._tell = observer
        self._waiting: list[Job] = []
        self._running: list[Run] = []
        self._records: dict[str, RunRecord] = {}
        self._walls: list[tuple[Job, float]] = []
        self._attempts: dict[str, int] = {}
        self._elsewhere: set[str] = set()
        """Identities that another harness was seen to run."""

    def run(
        self, pending: Sequence[Job], finished: Mapping[str, RunRecord], stop: Interruption
    ) -> dict[str, RunRecord]:
        """Records of all jobs, by identity.

        Raises StoreError when the store cannot be written and Interrupted when a signal came; in
        both cases, and in any other, no process of a job is left.
        """
        self._records = dict(finished)
        self._waiting = list(launch_order(pending))
        overview_due = 0.0
        try:
            while self._waiting or self._running:
                stop.check()
                self._notice_cold_starts()
                self._follow()
                self._start_what_fits()
                if time.monotonic() >= overview_due:
                    overview_due = time.monotonic() + _OVERVIEW_S
                    self._tell(self._overview())
                time.sleep(self._place.options.poll_s)
        finally:
            self._end(self._running)
            for run in self._running:
                run.lock.release()
        return self._records

    # ------------------------------------------------------------- starting

    def _start_what_fits(self) -> None:
        for job in list(self._waiting):
            needed = self._records.get(job.needs) if job.needs else None
            if job.needs and needed is None:
                continue
            if needed is not None and needed.status is not RunStatus.FINISHED:
                self._skip(job, needed)
            elif self._slots.fits(job.world_size) and not self._place.servers.starting(
                job.toolchain.name
            ):
                self._claim(job, needed)

    def _skip(self, job: Job, needed: RunRecord) -> None:
        self._waiting.remove(job)
        record = RunRecord(
            name=job.name,
            identity=job.identity,
            folder=self._place.store.run_folder(job.name, job.identity),
            status=RunStatus.SKIPPED,
            wall_s=0.0,
            argv=(),
            error=RankError(
                0, f"not started: {needed.name}, whose weights it needs, {_end_of(needed)}"
            ),
        )
        self._conclude(job, record)

    def _claim(self, job: Job, needed: RunRecord | None) -> None:
        """Start a job, or take the result of another harness that has run it meanwhile."""
        lock = self._place.store.lock(job.identity)
        if not lock.acquire():
            if job.identity not in self._elsewhere:
                self._elsewhere.add(job.identity)
                self._tell(Waiting(time.time(), job))
            return
        try:
            self._waiting.remove(job)
            record = self._record_of_another(job)
            if record is None:
                self._start(job, needed, lock)
                return
        except BaseException:
            lock.release()
            raise
        lock.release()
        self._conclude(job, record)

    def _record_of_another(self, job: Job) -> RunRecord | None:
        """What another harness made of the job since this one looked for finished runs."""
        if self._place.options.fresh and job.identity not in self._elsewhere:
            return None
        record = self._place.store.record(job.identity)
        if record is None or record.status is not RunStatus.FINISHED or stale(record):
            return None
        return replace(record, name=job.name, reused=True)

    def _start(self, job: Job, needed: RunRecord | None, lock: RunLock) -> None:
        attempt = self._attempts[job.identity] = self._attempts.get(job.identity, 0) + 1
        taken, left = self._slots.take(job.world_size)
        run = start_run(
            self._place,
            job,
            seed_checkpoint=seed_checkpoint_of(needed.folder) if needed else job.starts_from,
            slots=taken,
            attempt=attempt,
            lock=lock,
        )
        self._slots = left
        self._running.append(run)
        self._tell(Started(time.time(), job, taken, run.call.argv, attempt))

    # ------------------------------------------------------------ following

    def _follow(self) -> None:
        for run in list(self._running):
            over = run.is_over()  # asked first: then no step can be missed
            steps = run.new_steps()
            for line in steps:
                told = Step(time.time(), run.job, line.step, line.loss, run.elapsed_s, run.eta_s)
                self._tell(told)
            faults = due(run.job, {line.step for line in steps}, run.struck)
            for index, fault in faults.items():
                strike(self._place, run, index, fault)
            settle(run, call_is_over=over)
            if over:
                self._leave(run)
            elif sentence := run.overdue(self._experiment):
                self._leave_hung(run, sentence)

    def _leave(self, run: Run) -> None:
        """A job's agents have ended by themselves: see what came of the job."""
        self._end([run])  # ranks outlive an agent that was killed, for a moment
        if self._goes_on(run):
            return
        error = run.error()
        if error is None:
            self._finish(run, RunStatus.FINISHED, None)
        elif run.last is None and run.attempt < MAX_ATTEMPTS and is_infrastructure_fault(error):
            self._release(run)
            self._waiting.insert(0, run.job)
            self._tell(Retrying(time.time(), run.job, error.message))
        else:
            self._finish(run, RunStatus.CRASHED, error)

    def _leave_hung(self, run: Run, sentence: str) -> None:
        processes.ask_for_stacks(run.call.targets, trainer_of(run.job.spec).stack_signal)
        self._end([run])
        if not self._goes_on(run, sentence):
            self._finish(run, RunStatus.HUNG, run.hung(sentence))

    def _goes_on(self, run: Run, why: str = "") -> bool:
        """Start the next segment of a run, or its ranks again, where there is more to come."""
        if not comes_in_passes(run.job):
            return False
        decision = run.decide()
        if decision.call is None:
            return False
        settle(run, call_is_over=True)
        go_on(self._place, run, decision.call)
        reason = f"{decision.reason}: {why}" if why else decision.reason
        self._tell(GoingOn(time.time(), run.job, reason, run.call.argv))
        return True

    def _finish(self, run: Run, status: RunStatus, error: RankError | None) -> None:
        record = self._place.store.finish_run(run.record(status, error), run.facts())
        self._walls.append((run.job, record.wall_s))
        self._release(run)
        self._conclude(run.job, record)

    def _release(self, run: Run) -> None:
        self._running.remove(run)
        self._slots = self._slots.give(run.slots)
        run.lock.release()

    def _conclude(self, job: Job, record: RunRecord) -> None:
        self._records[job.identity] = record
        to_come = (*self._waiting, *(run.job for run in self._running))
        self._place.servers.keep({other.toolchain.name for other in to_come})
        self._tell(Ended(time.time(), job, record))

    def _end(self, runs: Sequence[Run]) -> None:
        targets = [target for run in runs for target in run.call.targets]
        processes.end_all(targets, self._place.options.grace_s)
        for run in runs:
            run.call.note_end()

    # -------------------------------------------------------------- telling

    def _notice_cold_starts(self) -> None:
        for toolchain, complaint in self._place.servers.take_failures().items():
            message = f"no warm start for {toolchain}, its ranks start cold: {complaint}"
            self._tell(Notice(time.time(), message))

    def _overview(self) -> Overview:
        unfinished = [run.pace for run in self._running]
        unfinished += [Pace(job.world_size) for job in self._waiting]
        return Overview(
            at=time.time(),
            done=len(self._records),
            total=len(self._records) + len(unfinished),
            running=tuple(run.job.name for run in self._running),
            eta_s=matrix_eta_s(self._walls, unfinished, self._slot_count),
        )


def _end_of(record: RunRecord) -> str:
    return "was skipped" if record.status is RunStatus.SKIPPED else str(record.status)
