"""Which runs may be stopped before their last step, and when.

A test set is judged at planned looks while it trains, and ends once its verdict is known. A control
and its repeats run only for their test sets: they end once all of these have been stopped.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from converge_harness.launch.events import Notice, Observer
from converge_harness.launch.next_call import calls_again
from converge_harness.launch.options import Look, LookError, RunOptions, Training
from converge_harness.launch.progress import last_line
from converge_harness.model import (
    Ask,
    Experiment,
    Job,
    Plan,
    RankError,
    Role,
    RunRecord,
    RunStatus,
    Stop,
    settling_steps,
)
from converge_harness.seal import stale
from converge_harness.store import Store
from converge_harness.trainers import left_passes, trainer_of


def may_stop(job: Job, experiment: Experiment) -> bool:
    """Whether a job may be stopped at all, if it is long enough.

    An elastic or fault set is judged by its resumes, and one of several seeds by all of them.
    """
    return (
        job.role is Role.TEST
        and job.spec.stop is not Stop.NEVER
        and job.spec.ask is Ask.SAME
        and job.spec.trainer.can.probed
        and not calls_again(job)
        and not experiment.other_seeds
        and experiment.baseline is None
    )


def settling_looks(job: Job, experiment: Experiment) -> tuple[int, ...]:
    """The steps after which it may be settled that a job's loss is equivalent.

    None if it is unknown how long the learning rate rises (the rule warm-up-is-known refuses that).
    """
    after, warmup = experiment.stop_after, job.spec.warmup_steps
    if after is None or job.spec.stop is not Stop.SETTLED or not may_stop(job, experiment):
        return ()
    planned = () if warmup is None else settling_steps(job.steps, warmup)
    return tuple(step for step in planned if step >= after)


def looks(job: Job, experiment: Experiment) -> tuple[int, ...]:
    """The steps after which a running job is looked at, in order; none: it always trains on.

    Each look for a FAIL is at twice the steps of the one before it, so that it costs as much as it
    can still save. Of a run that is nearly over little is saved, and its last steps are missed.
    """
    after = experiment.stop_after
    if after is None or not may_stop(job, experiment):
        return ()
    doubling = itertools.takewhile(
        lambda step: 2 * step <= job.steps, (after << exponent for exponent in itertools.count())
    )
    return tuple(sorted({*doubling, *settling_looks(job, experiment)}))


def read_by(plan: Plan) -> dict[str, tuple[Job, ...]]:
    """By identity of a control or repeat that may end early, the test sets that read it.

    A control and its repeats end together, since limits are learnt from all of them up to one step.
    They train to their last step if any set is never stopped that they are needed for, or if the
    control is itself judged, by an anchor.
    """
    count = Counter(job.identity for job in plan.jobs)
    sets: dict[str, list[Job]] = {}
    for job in plan.jobs:
        if job.role is Role.TEST:
            for needed in plan.judged_by(job):
                sets.setdefault(needed.identity, []).append(job)
    found: dict[str, tuple[Job, ...]] = {}
    for control in plan.jobs:
        readers = tuple(sets.get(control.identity, ()))
        if control.role is not Role.CONTROL or not readers or _is_challenged(control, plan):
            continue
        family = (control, *plan.repeats_of(control))
        # The run of two sets may be needed by both.
        alone = all(count[each.identity] == 1 for each in (*family, *readers))
        probed = all(each.spec.trainer.can.probed and not calls_again(each) for each in family)
        if alone and probed and all(looks(each, plan.experiment) for each in readers):
            found |= dict.fromkeys((each.identity for each in family), readers)
    return found


def wait_steps(
    job: Job, experiment: Experiment, readers: Mapping[str, tuple[Job, ...]]
) -> tuple[int, ...]:
    """The steps after which a run may wait until others have come as far, in order.

    Of a set these are its first look, at which nearly every wrong set is found, and those at which
    it may be settled. A control or repeat waits for the sets that read it: where they are looked at
    first, and where they may be settled, if each of them may. Others have nothing to wait for.
    """
    sets = readers.get(job.identity, (job,))
    first = {found[0] for each in sets if (found := looks(each, experiment))}
    settling = [settling_looks(each, experiment) for each in sets]
    return tuple(sorted(first.union(*settling) if all(settling) else first))


def waiting(
    jobs: Iterable[Job], experiment: Experiment, readers: Mapping[str, tuple[Job, ...]]
) -> dict[str, tuple[int, ...]]:
    """By identity of each run that waits somewhere on CPUs, the steps after which it does.

    Ranks of a program of the user never wait.
    """
    own = [job for job in jobs if trainer_of(job.spec).own_rank_code]
    return {job.identity: steps for job in own if (steps := wait_steps(job, experiment, readers))}


def _is_challenged(control: Job, plan: Plan) -> bool:
    """Whether a control is itself judged, by the anchor."""
    experiment = plan.experiment
    return experiment.anchor is not None and control.spec.name == experiment.controls[0].name


class Looks:
    """Looks at the running test sets of one experiment, each when it is due."""

    def __init__(self, experiment: Experiment, options: RunOptions, observer: Observer) -> None:
        self._experiment = experiment
        self._options = options
        self._tell = observer
        self._due: dict[str, tuple[int, ...]] = {}
        """By identity, the steps after which looks are still due."""
        self._failed: dict[str, int] = {}
        """By identity, the step at which a look failed that is tried once more."""
        self._reached: dict[str, int] = {}
        """By identity, the last step of a run that was stopped."""

    def will_stop_any(self, jobs: Iterable[Job]) -> bool:
        """Whether one of the jobs may be stopped."""
        if self._options.look is None:
            return False
        return any(looks(job, self._experiment) for job in jobs)

    def is_due(self, job: Job, step: int) -> bool:
        """Whether to look at a job that has ended a step; not after its last."""
        if self._options.look is None:
            return False
        if job.identity not in self._due:
            self._due[job.identity] = looks(job, self._experiment)
        due = self._due[job.identity]
        tried = self._failed.get(job.identity, 0)
        return bool(due) and max(due[0], tried + 1) <= step < job.steps

    def why_to_stop(
        self, job: Job, records: Mapping[str, RunRecord], training: Mapping[str, Training]
    ) -> str:
        """Why a set that trains, and at which a look is due, may end now; empty if it trains on.

        ``records`` are those of runs that have ended, and ``training`` are all that have not and
        have ended a step, both by identity.
        """
        look, step = self._options.look, training[job.identity].step
        try:
            reason = look(job, records, training) if look else ""
        except LookError as error:
            # A file may have been read while it was replaced: once more, when a step has ended.
            if job.identity not in self._failed:
                self._failed[job.identity] = step
                return ""
            message = f"{job.name}: could not be judged after step {step}, and trains on: {error}"
            self._tell(Notice(time.time(), message))
            reason = ""
        if reason is not None:
            self._failed.pop(job.identity, None)
        if reason == "":
            later = tuple(each for each in self._due[job.identity] if each > step)
            self._due[job.identity] = later
        return reason or ""

    def why_to_end(
        self, job: Job, step: int, records: Mapping[str, RunRecord], *, in_passes: bool
    ) -> str:
        """Why a control or repeat may end after a step; empty if it trains on.

        ``in_passes``: it could continue from a checkpoint.
        """
        sets = self._options.read_by.get(job.identity, ())
        stopped = [self._stopped_by(each, records) for each in sets]
        return why_to_end(job, step, stopped, in_passes=in_passes)

    def waiting(self, jobs: Iterable[Job]) -> dict[str, tuple[int, ...]]:
        """By identity of each run that may wait for others, the steps after which it does.

        None does while it holds GPUs that they need.
        """
        if self._options.gpus or self._options.look is None:
            return {}
        return waiting(jobs, self._experiment, self._options.read_by)

    def stops_again(
        self, job: Job, records: Mapping[str, RunRecord], training: Mapping[str, Training]
    ) -> bool | None:
        """Whether a set that was stopped earlier would be again, as the function of that name."""
        look = self._options.look
        return look is not None and stops_again(job, self._experiment, look, records, training)

    def may_train_on(
        self,
        job: Job,
        step: int,
        records: Mapping[str, RunRecord],
        training: Mapping[str, Training],
        *,
        in_passes: bool,
    ) -> bool:
        """Whether a run that waits after a step may train on.

        A test set may, once it was judged at this look. A control or repeat may if

        - a set that reads it has trained on,
        - a set that reads it has ended without being stopped by that step, or
        - all of them were stopped, and it is not worth ending itself.

        ``in_passes`` as for ``why_to_end``.
        """
        sets = self._options.read_by.get(job.identity)
        if sets is None:
            return not self.is_due(job, step)
        if all(each.identity in records for each in sets):
            return not self.why_to_end(job, step, records, in_passes=in_passes)
        return any(self._needs_more(each, step, records, training) for each in sets)

    def _needs_more(
        self,
        job: Job,
        step: int,
        records: Mapping[str, RunRecord],
        training: Mapping[str, Training],
    ) -> bool:
        """Whether a set is judged by steps after this one of its control, as far as is known."""
        if job.identity not in records:
            return job.identity in training and training[job.identity].step > step
        last = self._stopped_by(job, records)
        return last is None or last > step

    def _stopped_by(self, job: Job, records: Mapping[str, RunRecord]) -> int | None:
        """The last step of a run that was stopped; None for others."""
        record = records.get(job.identity)
        if record is None or record.status is not RunStatus.STOPPED:
            return None
        if job.identity not in self._reached:  # asked at every poll
            self._reached[job.identity] = reached_by(job, record.folder)
        return self._reached[job.identity]


def why_to_end(job: Job, step: int, sets: Sequence[int | None], *, in_passes: bool) -> str:
    """Why a control or repeat may end after a step, in a clause; empty if it trains on.

    It may end once every set that reads it was stopped, and no earlier than the last of them. A set
    that ended in any other way is judged to its last step, or has to be repeated.

    Args:
        job: any job; one that no set reads never ends so.
        step: its last.
        sets: the last step of each set that reads it; None if that was not stopped.
        in_passes: whether it could continue from a checkpoint.
    """
    stopped = [each for each in sets if each is not None]
    if not stopped or len(stopped) < len(sets) or not max(stopped) <= step < job.steps:
        return ""
    if not is_worth_ending(job, step, in_passes=in_passes):
        return ""
    return f"every set that is judged by it was stopped after step {max(stopped)} at the latest"


def is_worth_ending(job: Job, step: int, *, in_passes: bool) -> bool:
    """Whether to end a run after a step although somebody may want its further ones later.

    It then continues from its checkpoint. Without one it would begin again, which must not cost
    more than what is saved now.
    """
    return in_passes or 2 * step <= job.steps


def reached_by(job: Job, folder: Path) -> int:
    """The last step that a run has ended, by what it left; 0 before its first."""
    line = last_line(folder, in_passes=left_passes(job, folder))
    return line.step if line else 0


def used_again(
    jobs: Iterable[Job],
    records: Mapping[str, RunRecord],
    store: Store,
    experiment: Experiment,
    options: RunOptions,
) -> tuple[dict[str, RunRecord], dict[str, RunRecord], frozenset[str]]:
    """Earlier runs that were stopped: those that would be again, so need not run; and all of them.

    Also the identities of runs that another process holds, which are left to it. What is used again
    is read (``options.read_stopped``) before another process can let it train on.

    Args:
        jobs: to run. records: of finished runs, by identity.
        store: of the runs. experiment: theirs. options: for the run.

    Raises StoreError if a record is damaged, or a lock cannot be written.
    """
    by_identity = {job.identity: job for job in jobs}
    with ExitStack() as locks:
        mine: dict[str, RunRecord | None] = {}
        elsewhere: set[str] = set()
        for identity in by_identity.keys() - records.keys():
            lock = store.lock(identity)
            if not _was_stopped(store.record(identity)):
                # Who runs it may stop it before this process would start it.
                if lock.path.exists() and not lock.is_free():
                    elsewhere.add(identity)
            elif lock.acquire():
                locks.callback(lock.release)
                mine[identity] = store.record(identity)
            else:
                elsewhere.add(identity)
        stopped = unchanged_stopped(mine)
        again = stopped_again(by_identity.values(), stopped, experiment, options, records)
        for identity, record in again.items():
            read_if_stopped(by_identity[identity], record, options)
    return again, stopped, frozenset(elsewhere)


def read_if_stopped(job: Job, record: RunRecord, options: RunOptions) -> None:
    """Read what is needed of a run that was stopped; its lock must be held."""
    if options.read_stopped is not None and _was_stopped(record):
        options.read_stopped(job, record)


def _was_stopped(record: RunRecord | None) -> bool:
    return record is not None and record.status is RunStatus.STOPPED


def unchanged_stopped(records: Mapping[str, RunRecord | None]) -> dict[str, RunRecord]:
    """Of earlier runs by identity, those that were stopped and have not changed since.

    Raises StoreError as ``stale`` does.
    """
    return {
        identity: record
        for identity, record in records.items()
        if record and record.status is RunStatus.STOPPED and not stale(record)
    }


def stopped_again(
    jobs: Iterable[Job],
    stopped: Mapping[str, RunRecord],
    experiment: Experiment,
    options: RunOptions,
    records: Mapping[str, RunRecord],
) -> dict[str, RunRecord]:
    """Of runs that were stopped earlier, those that would be stopped again, so need not run.

    A control or repeat is among them if all sets that read it are.

    Args:
        jobs: of the plan.
        stopped: the records of those that were stopped, as ``unchanged_stopped`` returns them.
        experiment: theirs.
        options: for the run.
        records: of finished runs, by identity.
    """
    look, jobs = options.look, tuple(jobs)
    if look is None:
        return {}
    there = {
        job.identity: Training(record.folder, reached_by(job, record.folder), stopped=True)
        for job in jobs
        if (record := stopped.get(job.identity))
    }
    found = {
        job.identity: stopped[job.identity]
        for job in jobs
        if job.identity in there and stops_again(job, experiment, look, records, there)
    }
    steps = {identity: there[identity].step for identity in found}
    ended = {
        job.identity: stopped[job.identity]
        for job in jobs
        if job.identity in there and (sets := options.read_by.get(job.identity))
        if why_to_end(
            job,
            there[job.identity].step,
            [steps.get(each.identity) for each in sets],
            in_passes=left_passes(job, there[job.identity].folder),
        )
    }
    return found | ended


def stops_again(
    job: Job,
    experiment: Experiment,
    look: Look,
    records: Mapping[str, RunRecord],
    training: Mapping[str, Training],
) -> bool | None:
    """Whether a set that was stopped earlier would be again, so that it need not run.

    None while a run that it is judged by has not come as far. ``records`` are those of runs that
    have ended, and ``training`` are others, itself among them, both by identity.
    """
    planned = looks(job, experiment)
    if not planned or training[job.identity].step < planned[0]:
        return False
    try:
        answer = look(job, records, training)
    except LookError:
        return False
    return None if answer is None else bool(answer)


def stopped_error(reason: str, step: int, steps: int) -> RankError:
    """What the record of a stopped run says."""
    return RankError(None, f"{reason}; it ended after step {step} of {steps}")
