"""Which test sets may be stopped before their last step, and when to look at them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping

from converge_harness.launch.events import Notice, Observer
from converge_harness.launch.next_call import calls_again
from converge_harness.launch.options import LookError, RunOptions, Training
from converge_harness.launch.progress import last_line
from converge_harness.model import (
    Ask,
    Experiment,
    Job,
    RankError,
    Role,
    RunRecord,
    RunStatus,
    Stop,
    settling_steps,
)
from converge_harness.seal import stale
from converge_harness.trainers import comes_in_passes


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
    """The steps after which it may be settled that a job's loss is equivalent."""
    after = experiment.stop_after
    if after is None or job.spec.stop is not Stop.SETTLED or not may_stop(job, experiment):
        return ()
    warmup = job.spec.setting("lr_scheduler.warmup_steps", 0)
    planned = settling_steps(job.steps, warmup if isinstance(warmup, int) else 0)
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


def would_stop_again(
    job: Job,
    record: RunRecord,
    experiment: Experiment,
    options: RunOptions,
    records: Mapping[str, RunRecord],
) -> bool:
    """Whether an earlier run was stopped and would be stopped again, so that it need not run.

    ``records`` are those of finished runs, by identity. Raises StoreError as ``stale`` does.
    """
    look = options.look
    if look is None or record.status is not RunStatus.STOPPED:
        return False
    planned = looks(job, experiment)
    reached = last_line(record.folder, in_passes=comes_in_passes(job))
    if not planned or reached is None or reached.step < planned[0] or stale(record):
        return False
    try:
        return bool(look(job, records, {job.identity: Training(record.folder, reached.step)}))
    except LookError:
        return False


def stopped_error(reason: str, step: int, steps: int) -> RankError:
    """What the record of a stopped run says."""
    return RankError(None, f"{reason}; it ended after step {step} of {steps}")
