"""Runs a plan on this machine: reuse, warm start, check, then torchrun jobs packed into slots.

A single-threaded loop starts, follows and ends the jobs; when it returns or raises, none of their
processes is left.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from converge_harness.errors import ConfigError, Problem
from converge_harness.launch import processes
from converge_harness.launch.check import check_jobs, require_seed_checkpoints, unchecked
from converge_harness.launch.events import (
    Ended,
    GoingOn,
    Notice,
    Observer,
    Overview,
    Preparing,
    Queued,
    Retrying,
    Reused,
    RunsElsewhere,
    Started,
    Step,
    Waiting,
)
from converge_harness.launch.interruption import Interruption, interruptible
from converge_harness.launch.local.agents import (
    Machine,
    end_faults,
    end_start,
    let_train_on,
    start_next_call,
    start_run,
    strike,
    strike_by_curve,
)
from converge_harness.launch.local.memory import GIB, available_bytes, ranks_that_fit
from converge_harness.launch.local.run import Run
from converge_harness.launch.next_call import calls_again, faults_due
from converge_harness.launch.options import RunOptions, Training
from converge_harness.launch.private_folder import private_folder, remove_left_behind
from converge_harness.launch.progress import Pace, matrix_eta_s
from converge_harness.launch.stopping import (
    Looks,
    reached_by,
    read_if_stopped,
    stopped_again,
    stopped_error,
    unchanged_stopped,
    used_again,
)
from converge_harness.launch.waiting_groups import (
    MayStart,
    WaitingGroup,
    groups_of,
    may_start,
    still_fit,
)
from converge_harness.launch.warm import WarmServers
from converge_harness.model import (
    LONG,
    Experiment,
    Job,
    Plan,
    RankError,
    Role,
    RunRecord,
    RunStatus,
    Technique,
)
from converge_harness.run_folder.checkpoints import is_whole, newest_whole
from converge_harness.run_folder.layout import seed_checkpoint_of
from converge_harness.seal import stale
from converge_harness.store import RunLock, Store
from converge_harness.trainers import (
    Resources,
    environment,
    is_complete,
    trainer_of,
)
from converge_harness.trainers.environment import SHARE_GPUS
from converge_harness.trainers.failure import is_infrastructure_fault
from converge_harness.wording import counted


def run_plan(
    plan: Plan, store: Store, options: RunOptions, observer: Observer
) -> tuple[RunRecord, ...]:
    """Run every job of a plan; return the records in the plan's order.

    Finished jobs with the same identity are reused without starting a process. Must be called in
    the main thread: the kernel kills the processes when the thread that started them ends.

    Raises:
        ConfigError: a toolchain refuses a job's config; nothing was launched.
        ToolchainError: a toolchain does not start.
        StoreError: the store cannot be read or written.
        Interrupted: Ctrl-C or a signal; no process is left, and finished runs are kept.
    """
    remove_left_behind()  # even if nothing has to run
    records, others = ({}, {}) if options.fresh else finished_runs(plan.jobs, store)
    to_use = () if options.fresh else plan.jobs
    again, stopped, elsewhere = used_again(to_use, records, store, plan.experiment, options)
    records |= {identity: replace(each, reused=True) for identity, each in again.items()}
    for identity, why in others.items():
        name = next(job.name for job in plan.jobs if job.identity == identity)
        observer(Notice(time.time(), f"{name} runs again: {why}"))
    for job in plan.jobs:
        if job.identity in records:
            observer(Reused(time.time(), job, replace(records[job.identity], name=job.name)))
    pending = {job.identity: job for job in plan.jobs if job.identity not in records}
    if pending:
        jobs = tuple(pending.values())
        require_seed_checkpoints(jobs, records, store)
        store.require_writable()
        with interruptible() as stop:
            earlier = Earlier(records, stopped, elsewhere)
            records = _run(plan, jobs, earlier, store, options, observer, stop)
    return tuple(replace(records[job.identity], name=job.name) for job in plan.jobs)


def finished_runs(jobs: Sequence[Job], store: Store) -> tuple[dict[str, RunRecord], dict[str, str]]:
    """Records of reusable earlier runs, by identity, and why other finished runs cannot be reused.

    They cannot if their evidence or one of their sources has changed since. Raises StoreError if a
    record is damaged or has a newer schema.
    """
    found: dict[str, RunRecord] = {}
    others: dict[str, str] = {}
    for job in {job.identity: job for job in jobs}.values():
        record = store.record(job.identity)
        if record is None or record.status is not RunStatus.FINISHED:
            continue
        if why := stale(record):
            others[job.identity] = why
        elif is_complete(job, record.folder):
            found[job.identity] = replace(record, reused=True)
    return found, others


def _run(
    plan: Plan,
    jobs: tuple[Job, ...],
    earlier: Earlier,
    store: Store,
    options: RunOptions,
    observer: Observer,
    stop: Interruption,
) -> dict[str, RunRecord]:
    inherited = dict(os.environ)
    loopback = _loopback()
    common = environment(inherited, Resources(device=options.device, loopback=loopback))
    slots = _slots(plan, jobs, options)
    with private_folder() as private, closing(WarmServers(common, options.device)) as servers:
        warmed = tuple(job for job in jobs if job.spec.trainer.can.warm_start)
        toolchains = {job.toolchain.name: job.toolchain for job in warmed}
        if options.warm and not options.gpus:
            for name, toolchain in toolchains.items():
                observer(Preparing(time.time(), f"loading {name} once for all its ranks"))
                servers.want(toolchain)
        asked = tuple(job for job in jobs if job.spec.trainer.can.checks_config)
        to_check = unchecked(asked, store) if options.check else ()
        if to_check:
            observer(Preparing(time.time(), f"checking {counted(len(to_check), 'config')}"))
            check_jobs(to_check, store, options, inherited, servers, stop)
        for job in jobs:
            observer(Queued(time.time(), job))
        place = Machine(store, options, servers, inherited, loopback, private)
        supervisor = Supervisor(plan.experiment, place, slots, available_bytes(), observer)
        return supervisor.run(jobs, earlier, stop)


def _slots(plan: Plan, jobs: Sequence[Job], options: RunOptions) -> Slots:
    """GPUs, or slots on the CPU.

    Raises ConfigError if a job needs more GPUs than there are, or would have to share one and
    cannot.
    """
    if options.gpus:
        problems = [*_too_large(jobs, options), *_cannot_share(jobs, options)]
        if problems:
            raise ConfigError(problems)
        return Slots.of(options.gpus)
    cores = len(os.sched_getaffinity(0))
    return cpu_slots(cores, jobs, plan.experiment.cpu_ranks)


ON_THE_CPU = "CUDA_VISIBLE_DEVICES= (empty) lets it train on the CPU"


def _too_large(jobs: Iterable[Job], options: RunOptions) -> Iterator[Problem]:
    slots = Slots.of(options.gpus)
    for job in jobs:
        if slots.fits(job.world_size):
            continue
        sharing = f"{SHARE_GPUS}=1 in the environment lets ranks share a GPU, by NCCL 2.30; "
        can = trainer_of(job.spec).own_rank_code
        message = f"needs {job.world_size} GPUs, but there are {len(options.gpus)}"
        yield Problem(job.name, message, (sharing if can else "") + ON_THE_CPU)


def _cannot_share(jobs: Iterable[Job], options: RunOptions) -> Iterator[Problem]:
    for job in jobs:
        own = trainer_of(job.spec).own_rank_code
        if options.shares_gpus and job.world_size > 1 and not own:
            yield Problem(
                job.name,
                f"its program chooses a GPU per rank by itself, so {SHARE_GPUS}=1 cannot share one",
                f"unset the variable where there is a GPU per rank; {ON_THE_CPU}",
            )


def _loopback() -> str | None:
    """Name of the loopback interface, if any: all ranks are on this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is known of earlier runs of jobs before any starts."""

    finished: Mapping[str, RunRecord]
    """By identity, those that are used again."""
    stopped: Mapping[str, RunRecord]
    """By identity, those that were stopped."""
    elsewhere: frozenset[str]
    """Identities of those that another converge process holds."""


MAX_ATTEMPTS = 2
_OVERVIEW_S = 1.0


class Supervisor:
    """Runs pending jobs; ``run`` is called once."""

    def __init__(
        self,
        experiment: Experiment,
        place: Machine,
        slots: Slots,
        memory: int,
        observer: Observer,
    ) -> None:
        self._experiment = experiment
        self._place = place
        self._slots = slots
        self._slot_count = len(slots.free)
        self._memory = memory
        """Bytes that all ranks together may have."""
        self._rank_bytes = GIB
        """What a rank needs, as far as is known."""
        self._room = waiting_ranks(experiment, self._slot_count, memory)
        """For how many ranks there is memory in runs that wait for each other."""
        self._nobody_waits = False
        """Ranks need more memory than was thought: those that wait train on, and no other waits."""
        self._waits: dict[str, tuple[int, ...]] = {}
        """By identity of a run that may wait, the steps after which it does."""
        self._groups: tuple[WaitingGroup, ...] = ()
        self._tell = observer
        self._looks = Looks(experiment, place.options, observer)
        self._waiting: list[Job] = []
        self._running: list[Run] = []
        self._records: dict[str, RunRecord] = {}
        self._walls: list[tuple[Job, float]] = []
        self._attempts: dict[str, int] = {}
        self._elsewhere: set[str] = set()
        """Identities that another converge process is running."""
        self._wanted: dict[str, RunLock] = {}
        """Tell that process that this one waits for it, by identity."""
        self._earlier: dict[str, RunRecord] = {}
        """By identity, earlier runs of waiting test sets that were stopped, and may be used again
        once what they are judged by has come as far; and where they ended."""
        self._ended_at: dict[str, Training] = {}

    def run(
        self,
        pending: Sequence[Job],
        earlier: Earlier,
        stop: Interruption,
    ) -> dict[str, RunRecord]:
        """Records of all jobs, by identity.

        Raises StoreError if the store cannot be written and Interrupted if a signal came. In all
        cases no process of a job is left.
        """
        self._records = dict(earlier.finished)
        self._waiting = list(launch_order(pending, tests_last=self._looks.will_stop_any(pending)))
        self._waits = self._looks.waiting(pending)
        read_by = self._place.options.read_by
        self._groups = groups_of(pending, self._waits.keys(), read_by)
        for job in pending:
            if job.identity in earlier.elsewhere:
                self._leave_to_another(job)
            elif job.role is Role.TEST and (record := earlier.stopped.get(job.identity)):
                self._remember_earlier(job, record)
        overview_due = 0.0
        try:
            while self._waiting or self._running:
                stop.check()
                self._notice_cold_starts()
                self._follow()
                self._wake_what_fits()
                self._start_what_fits()
                if time.monotonic() >= overview_due:
                    overview_due = time.monotonic() + _OVERVIEW_S
                    self._tell(self._overview())
                time.sleep(self._place.options.poll_s)
        finally:
            self._end(self._running)
            for lock in (*(run.lock for run in self._running), *self._wanted.values()):
                lock.release()
        return self._records

    # ------------------------------------------------------------- starting

    def _start_what_fits(self) -> None:
        if self._nobody_waits and any(run.is_waiting for run in self._running):
            return  # they are in memory, and need these slots first
        for job in list(self._waiting):
            needed = self._records.get(job.needs) if job.needs else None
            if job not in self._waiting or (job.needs and needed is None):
                continue
            if needed is not None and needed.status is not RunStatus.FINISHED:
                self._skip(job, needed)
            elif job.identity in self._earlier:
                self._use_again(job)
            elif (
                self._slots.fits(job.world_size)
                and not self._place.servers.starting(job.toolchain.name)
                and self._may_start(job) is not MayStart.LATER
            ):
                self._claim(job, needed)

    def _may_start(self, job: Job) -> MayStart:
        """Whether there is memory for a job beside those that wait, and whether it waits, too."""
        groups, room = self._groups, self._room
        return may_start(job.identity, groups, room, begun=self._begun, over=self._over)

    @property
    def _begun(self) -> set[str]:
        """Identities of runs that are in memory."""
        return {run.job.identity for run in self._running}

    @property
    def _over(self) -> set[str]:
        """Identities of runs that have ended, or wait no more."""
        past = {run.job.identity for run in self._running if not run.waits}
        return self._records.keys() | past

    def _note_memory(self, job: Job, rank_bytes: int) -> None:
        """Let fewer wait, or none, once a rank turns out to need more memory than was thought."""
        if rank_bytes <= self._rank_bytes:
            return
        groups = [group for group in self._groups if group.least_ranks() <= self._room]
        self._rank_bytes = rank_bytes
        self._room = waiting_ranks(self._experiment, self._slot_count, self._memory, rank_bytes)
        if still_fit(groups, self._room, begun=self._begun, over=self._over):
            return
        self._groups, self._nobody_waits = (), True
        message = (
            f"a rank of {job.name} has {rank_bytes / GIB:.1f} GiB in memory: runs no longer wait "
            "for each other (waiting_ranks in [stop])"
        )
        self._tell(Notice(time.time(), message))

    def _use_again(self, job: Job) -> None:
        """Use a set's earlier run, if it would be stopped again; wait while that is not known."""
        record = self._earlier[job.identity]
        again = self._looks.stops_again(job, self._records, self._training)
        if again is None:
            return
        del self._earlier[job.identity], self._ended_at[job.identity]
        if again:
            self._use_stopped(job, record)

    def _use_stopped(self, job: Job, record: RunRecord) -> None:
        """Use a run that was stopped, unless another process has begun to let it train on."""
        lock = self._place.store.lock(job.identity)
        if not lock.acquire():
            self._leave_to_another(job)
            return
        try:
            if self._place.store.record(job.identity) != record:
                self._leave_to_another(job)
                return
            read_if_stopped(job, record, self._place.options)
        finally:
            lock.release()
        self._is_here(job)
        self._earlier.pop(job.identity, None)
        self._ended_at.pop(job.identity, None)
        self._waiting.remove(job)
        self._conclude(job, replace(record, name=job.name, reused=True))

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
        """Start a job, or use the result of another converge process that has run it meanwhile."""
        lock = self._place.store.lock(job.identity)
        if not lock.acquire():
            self._leave_to_another(job)
            self._want(job)
            return
        try:
            stopped = job.identity in self._elsewhere and self._was_stopped(job)
            record = None if stopped else self._record_of_another(job)
            if not stopped:
                self._is_here(job)
                self._waiting.remove(job)
                if record is None:
                    self._start(job, needed, lock)
                    return
        except BaseException:
            lock.release()
            raise
        lock.release()
        if record is None:
            self._take_over(job)
        else:
            self._conclude(job, record)

    def _leave_to_another(self, job: Job) -> None:
        """Wait for the run of another converge process."""
        if job.identity not in self._elsewhere:
            self._elsewhere.add(job.identity)
            self._tell(RunsElsewhere(time.time(), job))

    def _record_of_another(self, job: Job) -> RunRecord | None:
        """Record by another converge process, made after this one looked for finished runs."""
        if self._place.options.fresh and job.identity not in self._elsewhere:
            return None
        record = self._place.store.record(job.identity)
        if record is None or record.status is not RunStatus.FINISHED or stale(record):
            return None
        return replace(record, name=job.name, reused=True)

    def _want(self, job: Job) -> None:
        """Tell the process that runs a job that this one waits for it; one of several does."""
        lock = self._place.store.wanted(job.identity)
        if job.identity not in self._wanted and lock.acquire():
            self._wanted[job.identity] = lock

    def _is_here(self, job: Job) -> None:
        """No other process is waited for any longer because of a job."""
        self._elsewhere.discard(job.identity)
        lock = self._wanted.pop(job.identity, None)
        if lock is not None:
            lock.release()

    def _was_stopped(self, job: Job) -> bool:
        """Whether the run of a job that another process had was stopped by it."""
        record = self._place.store.record(job.identity)
        return record is not None and record.status is RunStatus.STOPPED

    def _take_over(self, job: Job) -> None:
        """Use a run that another process has stopped, or let it train on.

        That process may be about to stop other runs, too, without which nobody can know whether
        this one is of any more use: they are waited for.
        """
        store, related = self._place.store, self._related(job)
        ours = {run.job.identity for run in self._running}
        if not all(store.lock(each).is_free() for each in related - ours):
            return
        known = self._elsewhere | self._earlier.keys()
        jobs = tuple(each for each in self._waiting if each.identity in known)
        self._is_here(job)
        here = {each.identity: store.record(each.identity) for each in jobs}
        stopped = unchanged_stopped(here)
        options = self._place.options
        again = stopped_again(jobs, stopped, self._experiment, options, self._records)
        for each in jobs:
            if each.identity in again:
                self._use_stopped(each, again[each.identity])
        is_left = job in self._waiting and job.identity not in self._elsewhere
        if is_left and job.role is Role.TEST and job.identity in stopped:
            self._remember_earlier(job, stopped[job.identity])

    def _remember_earlier(self, job: Job, record: RunRecord) -> None:
        self._earlier[job.identity] = record
        reached = reached_by(job, record.folder)
        self._ended_at[job.identity] = Training(record.folder, reached)

    def _related(self, job: Job) -> set[str]:
        """Identities of runs that are stopped together with a job's, if at all; its own, too."""
        found = {job.identity}
        for identity, sets in self._place.options.read_by.items():
            together = {identity, *(each.identity for each in sets)}
            found |= together if job.identity in together else set()
        return found

    def _start(self, job: Job, needed: RunRecord | None, lock: RunLock) -> None:
        waits = self._may_start(job) is MayStart.WAITING
        attempt = self._attempts[job.identity] = self._attempts.get(job.identity, 0) + 1
        taken, left = self._slots.take(job.world_size)
        run = start_run(
            self._place,
            job,
            seed_checkpoint=seed_checkpoint_of(needed.folder) if needed else job.starts_from,
            slots=taken,
            attempt=attempt,
            lock=lock,
            waits=self._waits[job.identity] if waits else (),
        )
        self._slots = left
        self._running.append(run)
        self._tell(Started(time.time(), job, taken, run.call.argv, attempt))
        if run.continues_from is not None:
            reason = f"from its checkpoint of step {run.continues_from}"
            self._tell(GoingOn(time.time(), job, reason, run.call.argv))

    # ------------------------------------------------------------ following

    def _follow(self) -> None:
        for run in list(self._running):
            over = run.is_over()  # asked first, so that no step is missed
            faults = faults_due(run.job, self._new_steps(run), run.struck)
            for index, fault in faults.items():
                strike(self._place, run, index, fault)
            if not over and (due := run.fault_of_curve()):
                strike_by_curve(run, *due)
            end_faults(run, call_is_over=over)
            if over:
                self._leave(run)
            elif not run.is_waiting and (sentence := run.overdue(self._experiment)):
                self._leave_hung(run, sentence)
            elif not run.has_begun or self._is_saving(run):
                continue
            elif reason := self._why_to_stop(run):
                self._stop(run, reason)
            else:
                self._let_wait(run)

    def _is_saving(self, run: Run) -> bool:
        """Whether a run still writes the checkpoint of the step after which it waits."""
        if run.last is None or run.last.step not in run.saves:
            return False
        form = trainer_of(run.job.spec).checkpoint_form(run.job)
        return not is_whole(run.folder, run.last.step, form)

    def _let_wait(self, run: Run) -> None:
        """Give the slots of a run to others if its ranks wait for them now."""
        if run.last is None or run.is_waiting:
            return
        run.waits = tuple(step for step in run.waits if step >= run.last.step)
        if run.last.step not in run.waits[:1]:
            return
        run.wait()
        self._slots = self._slots.give(run.slots)
        self._tell(Waiting(time.time(), run.job, run.last.step))

    def _wake_what_fits(self) -> None:
        """Let runs train on that have waited for long enough, before others start."""
        waiting = [run for run in self._running if run.is_waiting]
        training = self._training if waiting else {}
        for run in waiting:
            if self._trains_on(run, training) and self._slots.fits(run.job.world_size):
                taken, self._slots = self._slots.take(run.job.world_size)
                let_train_on(run, taken)

    def _trains_on(self, run: Run, training: Mapping[str, Training]) -> bool:
        """Whether a waiting run lacks only free slots."""
        step = run.waits[0]
        # What another converge process runs may wait for this run, or not even know that it is
        # waited for.
        return (
            self._nobody_waits
            or bool(self._elsewhere)
            or self._looks.may_train_on(
                run.job, step, self._records, training, in_passes=run.in_passes
            )
            or (bool(self._why_to_end(run, step)) and self._has_to_go(run))
        )

    def _why_to_end(self, run: Run, step: int) -> str:
        """Why a control or repeat may end after a step; empty if it trains on."""
        return self._looks.why_to_end(run.job, step, self._records, in_passes=run.in_passes)

    def _has_to_go(self, run: Run) -> bool:
        """Whether another process waits for a run that it would have to begin again."""
        if run.last is None or run.last.step < LONG:  # it is soon as far
            return False
        form = trainer_of(run.job.spec).checkpoint_form(run.job)
        if newest_whole(run.folder, form) is not None:
            return False
        return not self._place.store.wanted(run.job.identity).is_free()

    def _new_steps(self, run: Run) -> set[int]:
        """Report the steps that have ended since the last call; return their numbers."""
        lines = run.new_steps()
        for line in lines:
            self._tell(Step(time.time(), run.job, line.step, line.loss, run.elapsed_s, run.eta_s))
            self._note_memory(run.job, line.memory_bytes)
        return {line.step for line in lines}

    def _leave(self, run: Run) -> None:
        """Handle a job whose agents have ended."""
        # Ranks may briefly outlive a killed agent. Those that had their time to stop get no more.
        self._end([run], at_once=run.call.out_of_grace)
        if self._goes_on(run):
            return
        error = run.error()
        if error is None:
            self._finish(run, RunStatus.FINISHED, None)
        elif run.may_begin_anew and run.attempt < MAX_ATTEMPTS and is_infrastructure_fault(error):
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

    def _why_to_stop(self, run: Run) -> str:
        """Why a run may end now; empty: it trains on, or no look is due."""
        if run.last is None:
            return ""
        if reason := self._why_to_end(run, run.last.step):
            return "" if self._has_to_go(run) else reason
        if not self._looks.is_due(run.job, run.last.step):
            return ""
        return self._looks.why_to_stop(run.job, self._records, self._training)

    @property
    def _training(self) -> dict[str, Training]:
        """All runs that have ended a step, also earlier ones that may be used again."""
        running = {
            run.job.identity: Training(run.folder, run.last.step)
            for run in self._running
            if run.last is not None
        }
        return self._ended_at | running

    def _stop(self, run: Run, reason: str) -> None:
        """End a test set whose verdict is known, or a run that nothing reads any more."""
        if run.is_over():  # it ended, or broke, while it was judged
            self._new_steps(run)
            self._leave(run)
            return
        self._end([run])
        self._new_steps(run)
        last = 0 if run.last is None else run.last.step
        if is_complete(run.job, run.folder):  # it was quicker
            self._finish(run, RunStatus.FINISHED, None)
        else:
            self._finish(run, RunStatus.STOPPED, stopped_error(reason, last, run.job.steps))

    def _goes_on(self, run: Run, why: str = "") -> bool:
        """Start the next segment of a run, or restart it, if there is more to do."""
        if not calls_again(run.job):
            return False
        end_start(run, by_itself=not why and not run.call.out_of_grace)
        decision = run.decide()
        if decision.call is None:
            return False
        end_faults(run, call_is_over=True)
        start_next_call(self._place, run, decision.call)
        reason = f"{decision.reason}: {why}" if why else decision.reason
        self._tell(GoingOn(time.time(), run.job, reason, run.call.argv))
        return True

    def _finish(self, run: Run, status: RunStatus, error: RankError | None) -> None:
        record = self._place.store.finish_run(run.record(status, error), run.facts())
        read_if_stopped(run.job, record, self._place.options)
        self._walls.append((run.job, record.wall_s))
        self._release(run)
        self._conclude(run.job, record)

    def _release(self, run: Run) -> None:
        self._running.remove(run)
        if not run.is_waiting:
            self._slots = self._slots.give(run.slots)
        run.lock.release()

    def _conclude(self, job: Job, record: RunRecord) -> None:
        self._records[job.identity] = record
        to_come = (*self._waiting, *(run.job for run in self._running))
        self._place.servers.keep_only({other.toolchain.name for other in to_come})
        self._tell(Ended(time.time(), job, record))

    def _end(self, runs: Sequence[Run], *, at_once: bool = False) -> None:
        targets = [target for run in runs for target in run.call.targets]
        processes.end_all(targets, None if at_once else self._place.options.grace_s)
        for run in runs:
            run.call.note_end()

    # ------------------------------------------------------------ reporting

    def _notice_cold_starts(self) -> None:
        for toolchain, complaint in self._place.servers.take_failures().items():
            message = f"no warm start for {toolchain}, so its ranks start cold: {complaint}"
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


RANKS_PER_CORE = 2
"""Ranks per core: a rank waits (rendezvous, collectives, files) about half of its time."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Free slots for ranks: GPU ids, or numbers on the CPU.

    An id that is there several times is a GPU that so many ranks share. The ranks of a job are
    assigned to all GPUs round-robin, so how many share one depends only on their number:
    with other numbers NCCL might choose another path, and sum in another order.
    """

    free: tuple[int, ...]
    places: int
    """How many different ids there are, with those that are taken."""

    @classmethod
    def of(cls, ids: Iterable[int]) -> Slots:
        free = tuple(sorted(ids))
        return cls(free, len(set(free)))

    def take(self, count: int) -> tuple[tuple[int, ...], Slots]:
        """Slots for ``count`` ranks, and the rest: the lowest of those with most room.

        Raises ValueError if there are too few: ask ``fits`` first.
        """
        taken = self._dealt(count)
        if taken is None:
            raise ValueError(f"{count} slots needed, {len(self.free)} are free")
        left = Counter(self.free)
        left.subtract(taken)
        return taken, replace(self, free=tuple(sorted(left.elements())))

    def give(self, taken: Iterable[int]) -> Slots:
        return replace(self, free=tuple(sorted((*self.free, *taken))))

    def fits(self, count: int) -> bool:
        return self._dealt(count) is not None

    def _dealt(self, count: int) -> tuple[int, ...] | None:
        room = Counter(self.free)
        order = sorted(room, key=lambda place: (-room[place], place))
        if len(order) < min(count, self.places):
            return None
        dealt = tuple(order[rank % self.places] for rank in range(count))
        return dealt if Counter(dealt) <= room else None


def cpu_slots(cores: int, jobs: Sequence[Job], wanted: int | None) -> Slots:
    """Slots on the CPU: ``wanted``, else two ranks per core, but enough for the largest job.

    If it needs more, its ranks share the cores.
    """
    largest = max((job.world_size for job in jobs), default=1)
    return Slots.of(range(max(wanted or RANKS_PER_CORE * cores, largest)))


def waiting_ranks(experiment: Experiment, training: int, memory: int, rank_bytes: int = GIB) -> int:
    """How many ranks of runs that wait for each other may be in memory: ``[stop]``, or what fits.

    Args:
        training: ranks that train at once. memory: bytes that all ranks together may have.
        rank_bytes: of one rank, as far as is known.
    """
    if experiment.waiting_ranks is not None:
        return experiment.waiting_ranks
    return ranks_that_fit(memory, training, rank_bytes)


def launch_order(jobs: Iterable[Job], *, tests_last: bool = False) -> tuple[Job, ...]:
    """Seed checkpoints first (others wait for them), then the longest jobs: large and compiled.

    Small jobs come last and fill the slots that large ones leave. ``tests_last`` is for test sets
    that may be stopped early: what they are judged by has to finish before.
    """
    largest_first = sorted(jobs, key=_weight, reverse=True)
    if not tests_last:
        return tuple(largest_first)
    return tuple(sorted(largest_first, key=lambda job: job.role is Role.TEST))


def _weight(job: Job) -> tuple[bool, int]:
    compiled = Technique.COMPILE in job.spec.techniques
    return job.role is Role.SEED, job.world_size * job.steps * (2 if compiled else 1)
