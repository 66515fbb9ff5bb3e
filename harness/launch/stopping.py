"""Which test sets may be stopped before their last step, and when to look at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from converge_harness.launch.options import RunOptions
from converge_harness.launch.progress import last_line
from converge_harness.model import Ask, Experiment, Job, RankError, Role, RunRecord, RunStatus
from converge_harness.seal import stale
from converge_harness.trainers import comes_in_passes


def first_look(job: Job, experiment: Experiment, options: RunOptions) -> int | None:
    """The step after which a job is looked at for the first time; None: it always trains on.

    A set of several passes is judged by its resumes, and one of several seeds by all of them.
    """
    after = experiment.stop_after
    may_stop = (
        job.role is Role.TEST
        and job.spec.stop
        and job.spec.ask is Ask.SAME
        and job.spec.trainer.can.probed
        and not comes_in_passes(job)
        and not experiment.other_seeds
    )
    if options.fail_look is None or after is None or not may_stop:
        return None
    # Of a run that is nearly over, little is saved, and its last steps are missed.
    return after if 2 * after <= job.steps else None


def next_look(step: int) -> int:
    """The step of the next look after one at ``step``: each costs as much as it can still save."""
    return 2 * step


def is_due(step: int, job: Job, look_at: int | None) -> bool:
    """Whether to look at a job now that a step has ended; not after its last."""
    return look_at is not None and look_at <= step < job.steps


class Looks:
    """Looks at the running test sets of one experiment, each when it is due."""

    def __init__(self, experiment: Experiment, options: RunOptions) -> None:
        self._experiment = experiment
        self._options = options
        self._due: dict[str, int | None] = {}
        """By identity, the step after which the next look is due; None: never."""

    def will_stop_any(self, jobs: Iterable[Job]) -> bool:
        """Whether one of the jobs may be stopped."""
        return any(first_look(job, self._experiment, self._options) is not None for job in jobs)

    def certain_fail(
        self, job: Job, folder: Path, step: int, records: Mapping[str, RunRecord]
    ) -> str:
        """Why a set that trains is certain to FAIL; empty if it is not, or not looked at now.

        ``step`` is its last, and ``records`` are those of finished runs, by identity.
        """
        look, identity = self._options.fail_look, job.identity
        if identity not in self._due:
            self._due[identity] = first_look(job, self._experiment, self._options)
        if look is None or not is_due(step, job, self._due[identity]):
            return ""
        reason = look(job, folder, records)
        if reason == "":
            self._due[identity] = next_look(step)
        return reason or ""


def still_certain(
    job: Job,
    record: RunRecord,
    experiment: Experiment,
    options: RunOptions,
    records: Mapping[str, RunRecord],
) -> bool:
    """Whether an earlier run was stopped and would be stopped again, so that it need not run.

    ``records`` are those of finished runs, by identity. Raises StoreError as ``stale`` does.
    """
    look = options.fail_look
    if look is None or record.status is not RunStatus.STOPPED:
        return False
    after = first_look(job, experiment, options)
    reached = last_line(record.folder, in_passes=False)
    if after is None or reached is None or reached.step < after or stale(record):
        return False
    return bool(look(job, record.folder, records))


def stopped_error(reason: str, step: int, steps: int) -> RankError:
    """What the record of a stopped run says."""
    return RankError(None, f"its FAIL was certain ({reason}), after step {step} of {steps}")
