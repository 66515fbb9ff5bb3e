"""The result of a job that is over, from the scheduler, its script, and the ranks' files.

Reads files but writes none. Evidence decides: a job has finished if its results are complete and it
ended with 0. The error is that of the failing rank, never torchrun's exit code.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converge_harness.errors import StoreError
from converge_harness.launch.batch_step import TERMINATED
from converge_harness.launch.kubernetes.objects import logs_command, object_name
from converge_harness.launch.next_call import CallOutcome, after
from converge_harness.launch.progress import last_line
from converge_harness.launch.script_end import damage_of_end, known_end
from converge_harness.launch.scripts import submit_argv
from converge_harness.launch.slurm.backend import JobState, Phase
from converge_harness.launch.slurm.commands import with_keys
from converge_harness.launch.slurm.submission import Submission
from converge_harness.launch.stopping import stopped_error
from converge_harness.model import Cluster, Job, Kubernetes, RankError, RunRecord, RunStatus
from converge_harness.run_folder.layout import (
    JOB,
    JOB_SCRIPT,
    LOGS,
    SLURM_LOG,
    call_number,
    newest_call_logs,
)
from converge_harness.store import read_json
from converge_harness.trainers import (
    Call,
    comes_in_passes,
    curves_of,
    is_complete,
    trainer_of,
)
from converge_harness.trainers.failure import has_failed_rank, launcher_tail, log_tail, rank_log

_TIME_IS_UP = frozenset({"TIMEOUT", "DEADLINE"})
_TAKEN_AWAY = frozenset({"OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED"})
"""Ends without an error in the ranks' logs, or with one that is only a consequence."""
_CANCELLED = "CANCELLED"
DEPENDENCY = "DependencyNeverSatisfied"
TOO_MANY_REQUEUES = "JobHoldMaxRequeue"


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that is known about a submitted job."""

    job: Job
    folder: Path
    submission: Submission
    state: JobState
    cluster: Cluster
    needed: RunRecord | None = None
    """Record of the seed-checkpoint job from which it starts; None if it needs none, or if that job
    is not over.
    """

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that submits the job, without its dependencies."""
        return submit_argv(self.folder, self.cluster)


def result_of(known: Known) -> RunRecord | None:
    """The record of a job that is over, or can never start; None for any other.

    A job that can never start is still in the queue; the caller has to cancel it.
    """
    state = known.state
    if state.phase in (Phase.PENDING, Phase.RUNNING) and not state.never:
        return None
    status, error = _never(known) if state.never else _over(known)
    return RunRecord(
        name=known.job.name,
        identity=known.job.identity,
        folder=known.folder,
        status=status,
        wall_s=state.ran_s or 0.0,
        argv=known.argv,
        error=error,
        requeues=_requeues(known),
    )


def facts(known: Known) -> dict[str, Any]:
    """What ``record.json`` has in addition to the record."""
    state, submission = known.state, known.submission
    document: dict[str, Any] = {}
    with suppress(StoreError):
        document = read_json(known.folder / JOB)
        del document["schema"]
    return {
        "started": submission.submitted,
        "host": state.nodes,
        "versions": dict(known.job.toolchain.versions),
        "job": document,
        "cluster": {
            "job_id": submission.job_id,
            "word": state.word,
            "reason": state.reason,
            "restarts": state.restarts,
            "nodes": state.nodes,
        },
    }


def skipped(job: Job, folder: Path, needed: RunRecord) -> RunRecord:
    """The record of a job that is not started because a job that it needs did not finish."""
    by_others = (RunStatus.SKIPPED, RunStatus.REFUSED, RunStatus.CANCELLED, RunStatus.INTERRUPTED)
    how = f"was {needed.status}" if needed.status in by_others else str(needed.status)
    why = f": {needed.error.text}" if needed.error else ""
    message = f"not started: {needed.name}, whose weights it needs, {how}{why}"
    return RunRecord(
        name=job.name,
        identity=job.identity,
        folder=folder,
        status=RunStatus.SKIPPED,
        wall_s=0.0,
        argv=(),
        error=RankError(None, message),
    )


# ------------------------------------------------------------------- decisions


def _never(known: Known) -> tuple[RunStatus, RankError]:
    needed, reason = known.needed, known.state.reason
    if reason == DEPENDENCY:
        if needed is not None and needed.status is not RunStatus.FINISHED:
            return RunStatus.SKIPPED, _error(skipped(known.job, known.folder, needed))
        return RunStatus.CANCELLED, RankError(
            None, f"not started: a job that it waited for is gone ({reason})"
        )
    if reason == TOO_MANY_REQUEUES:
        times = f" {count} times," if (count := _requeues(known)) else ""
        return RunStatus.REFUSED, RankError(
            None,
            f"was requeued{times} more often than the cluster allows ({reason}): find out why "
            f"(see {known.folder / SLURM_LOG}), and submit it again",
        )
    return RunStatus.REFUSED, RankError(
        None,
        f"Slurm will never start it: {with_keys(reason or known.state.word, known.cluster)}; "
        f"see {known.folder / JOB_SCRIPT}",
    )


def _over(known: Known) -> tuple[RunStatus, RankError | None]:
    state, submission = known.state, known.submission
    word = state.word
    returncode = _returncode(known)
    if returncode == 0 and word in ("", "COMPLETED"):
        return _ended_well(known)
    if submission.hung:
        return RunStatus.HUNG, _with_log(known, submission.cancelled)
    if word in _TIME_IS_UP:
        limit = f" of {known.cluster.time} ([cluster] time)" if known.cluster.time else ""
        return RunStatus.TIMED_OUT, _with_log(
            known, f"reached its time limit{limit} {_where(known)}"
        )
    if word == _CANCELLED or (submission.cancelled and state.phase is Phase.UNKNOWN):
        return _cancelled(known)
    if word in _TAKEN_AWAY:
        return RunStatus.CRASHED, _with_log(known, _taken(known))
    return RunStatus.CRASHED, _failed(known, returncode)


def _stopped(known: Known) -> tuple[RunStatus, RankError]:
    last = last_line(known.folder, in_passes=comes_in_passes(known.job))
    step = last.step if last else 0
    return RunStatus.STOPPED, stopped_error(known.submission.cancelled, step, known.job.steps)


def _ended_well(known: Known) -> tuple[RunStatus, RankError | None]:
    if is_complete(known.job, known.folder):
        return RunStatus.FINISHED, None
    last = last_line(known.folder, in_passes=comes_in_passes(known.job))
    step = None if last is None else last.step
    message = trainer_of(known.job.spec).incomplete(known.job, known.folder, step)
    return RunStatus.CRASHED, _with_log(known, message)


def _cancelled(known: Known) -> tuple[RunStatus, RankError]:
    state, needed = known.state, known.needed
    if known.submission.stopped:
        return _stopped(known)
    if known.submission.cancelled:
        by = known.submission.cancelled
    elif needed is not None and needed.status is not RunStatus.FINISHED:
        # By --kill-on-invalid-dep; some versions of Slurm show it only like this.
        return RunStatus.SKIPPED, _error(skipped(known.job, known.folder, needed))
    elif state.reason.startswith("by "):
        by = f"cancelled {state.reason} (a user's number)"
    else:
        by = "cancelled, not by converge"
        by += f" (Slurm: {state.reason})" if state.reason == DEPENDENCY else ""
    return RunStatus.CANCELLED, RankError(None, f"{by}, {_where(known)}")


def _taken(known: Known) -> str:
    """``Slurm: NODE_FAIL (reason) on node2, after step 5 of 20``."""
    state = known.state
    reason = f" ({state.reason})" if state.reason not in ("", "None", state.word) else ""
    nodes = f" on {state.nodes}" if state.nodes else ""
    return f"Slurm: {state.word}{reason}{nodes}, {_where(known)}"


def _where(known: Known) -> str:
    """The last finished step of the job, if its ranks say it."""
    if curves_of(known.job, known.folder) is not None:
        return "while the program ran"
    last = last_line(known.folder, in_passes=comes_in_passes(known.job))
    if last is None:
        return "before its first step was finished"
    return f"after step {last.step} of {known.job.steps}"


def _with_log(known: Known, message: str) -> RankError:
    """An error with the end of rank 0's log, else of its launcher's or the script's output."""
    logs = newest_call_logs(known.folder / LOGS)
    texts = (read for each in logs for read in (rank_log(each, 0), _of_launcher(known, each)))
    text = next(filter(None, texts), "")
    return RankError(None, message, text or log_tail(known.folder / SLURM_LOG))


def _of_launcher(known: Known, logs: Path) -> str:
    """The end of a launcher's log in which the output of its ranks is, too."""
    own = trainer_of(known.job.spec).own_rank_code
    return "" if own else launcher_tail(logs)


def _failed(known: Known, returncode: int | None) -> RankError:
    """The error of the rank that failed first; for an elastic set, with its segment."""
    job, logs = known.job, newest_call_logs(known.folder / LOGS)
    if known.cluster.kubernetes is not None:
        return _failed_in_pods(known, known.cluster.kubernetes, returncode)
    if returncode is None and known.state.phase is Phase.UNKNOWN:
        gone = f"Slurm no longer knows job {known.submission.job_id}"
        return _with_log(known, _unknown_end(known, gone))
    if returncode == TERMINATED and known.state.phase is Phase.UNKNOWN:
        message = "was ended by SIGTERM (time limit, preemption, scancel): Slurm no longer says why"
        return _with_log(known, f"{message}, {_where(known)}")
    script = known.folder / SLURM_LOG
    return _of_segment(known, trainer_of(job.spec).error(logs, logs, returncode, script))


def _failed_in_pods(known: Known, site: Kubernetes, returncode: int | None) -> RankError:
    """The same where converge cannot ask how a job ended."""
    job, logs, trainer = (
        known.job,
        newest_call_logs(known.folder / LOGS),
        trainer_of(known.job.spec),
    )
    name = known.submission.job_id or object_name(job)
    if returncode is None:
        return _with_log(known, _unknown_end(known, f"{JOB_SCRIPT} of JobSet {name} is gone"))
    error = trainer.error(logs, logs, returncode, None)
    # Without an error of a rank, torchrun's own last line would stand for rank 0.
    of_rank = error.rank is not None and (not trainer.own_rank_code or has_failed_rank(*logs))
    if returncode == TERMINATED and not of_rank:
        message = (
            "its first pod was ended by SIGTERM (deleted, evicted, time limit, or another pod of "
            f"the job failed), {_where(known)}: see kubectl events --namespace={site.namespace}"
        )
        return _with_log(known, message)
    if not logs:
        message = f"failed with exit code {returncode} before its ranks started"
        return RankError(None, f"{message}: see {logs_command(site.namespace, name)}")
    return _of_segment(known, error)


def _of_segment(known: Known, error: RankError) -> RankError:
    """The error of a call, in an elastic set with its segment."""
    job, logs = known.job, newest_call_logs(known.folder / LOGS)
    number = call_number(logs[0]) if logs else 0
    if not comes_in_passes(job) or not 0 < number <= len(job.spec.segments):
        return error
    # Its script makes one call per segment, and is never requeued.
    problem = after(job, Call(number, segment=number - 1), CallOutcome(ended_well=False)).problem
    return replace(error, message=f"{problem}: {error.message}")


def _unknown_end(known: Known, gone: str) -> str:
    """A sentence; ``gone`` says that nothing but ``ended.json`` could tell how the job ended."""
    if damage := damage_of_end(known.folder):
        return f"it is unknown how it ended, {_where(known)}: {damage}"
    return f"{gone}, and its end was not recorded ({_where(known)})"


def _returncode(known: Known) -> int | None:
    """Exit code of the script's last start; None if unknown."""
    state = known.state
    if state.exit_code is not None:
        return state.exit_code
    if (ended := known_end(known.folder)) is None:
        return None
    # The end of an earlier start does not count for the last.
    counts = state.phase is Phase.UNKNOWN or ended.restart >= state.restarts
    return ended.returncode if counts else None


def _requeues(known: Known) -> int:
    """How often it has been requeued; only its script records that, not accounting."""
    ended = known_end(known.folder)
    return max(known.state.restarts, ended.restart if ended else 0)


def _error(record: RunRecord) -> RankError:
    return record.error or RankError(None, str(record.status))
