"""The result of a job that is over, from the scheduler, its script, and the ranks' files.

Reads files but writes none. Evidence decides: a job has finished if its results are complete and it
ended with 0. The error is that of the failing rank, never torchrun's exit code.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from converge_harness.errors import StoreError
from converge_harness.launch.next_call import CallOutcome, after
from converge_harness.launch.progress import last_line
from converge_harness.launch.scheduler.backend import JobEnd, Known, NeverStarts, Phase
from converge_harness.launch.scheduler.script_end import damage_of_end, known_end
from converge_harness.launch.stopping import stopped_error
from converge_harness.model import Job, RankError, RunRecord, RunStatus
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.layout import (
    JOB,
    JOB_SCRIPT,
    LOGS,
    call_number,
    newest_call_logs,
)
from converge_harness.run_folder.records import RunFacts
from converge_harness.store import read_json
from converge_harness.trainers import (
    Call,
    comes_in_passes,
    curves_of,
    is_complete,
    trainer_of,
)
from converge_harness.trainers.failure import launcher_tail, log_tail, rank_log


def result_of(known: Known) -> RunRecord | None:
    """The record of a job that is over, or can never start; None for any other.

    A job that can never start is still in the queue; the caller has to cancel it.
    """
    state = known.state
    if state.phase in (Phase.PENDING, Phase.RUNNING) and not state.never:
        return None
    status, error = _over(known) if state.never is None else _never(known, state.never)
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


def facts(known: Known) -> RunFacts:
    """What ``record.json`` has in addition to the record."""
    state, submission = known.state, known.submission
    document: JobDocument = {}
    with suppress(StoreError):
        read = read_json(known.folder / JOB)
        document = cast("JobDocument", {key: read[key] for key in read if key != "schema"})
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


def _never(known: Known, why: NeverStarts) -> tuple[RunStatus, RankError]:
    needed, reason, backend = known.needed, known.state.reason, known.backend
    if why is NeverStarts.NEEDED:
        if needed is not None and needed.status is not RunStatus.FINISHED:
            return RunStatus.SKIPPED, _error(skipped(known.job, known.folder, needed))
        return RunStatus.CANCELLED, RankError(
            None, f"not started: a job that it waited for is gone ({reason})"
        )
    if why is NeverStarts.REQUEUES:
        times = f" {count} times," if (count := _requeues(known)) else ""
        return RunStatus.REFUSED, RankError(
            None,
            f"was requeued{times} more often than the cluster allows ({reason}): find out why "
            f"(see {known.folder / (backend.script_log or LOGS)}), and submit it again",
        )
    if why is NeverStarts.LAUNCH:
        return RunStatus.REFUSED, RankError(
            None,
            f"{backend.name} could not launch it on a node, requeued it and holds it ({reason}): "
            "find out why (the log of slurmd on the node), and submit it again",
        )
    return RunStatus.REFUSED, RankError(
        None,
        f"{backend.name} will never start it: "
        f"{backend.with_keys(reason or known.state.word, known.cluster)}; "
        f"see {known.folder / JOB_SCRIPT}",
    )


def _over(known: Known) -> tuple[RunStatus, RankError | None]:
    state, submission = known.state, known.submission
    returncode = _returncode(known)
    if returncode == 0 and state.end is JobEnd.BY_CODE:
        return _ended_well(known)
    if submission.hung:
        return RunStatus.HUNG, with_log(known, submission.cancelled)
    if state.end is JobEnd.TIME_IS_UP:
        limit = f" of {known.cluster.time} ([cluster] time)" if known.cluster.time else ""
        return RunStatus.TIMED_OUT, with_log(known, f"reached its time limit{limit} {where(known)}")
    cancelled_and_gone = bool(submission.cancelled) and state.phase is Phase.UNKNOWN
    if cancelled_and_gone or state.end in (JobEnd.CANCELLED, JobEnd.NEEDED):
        return _cancelled(known)
    if state.end is JobEnd.TAKEN_AWAY:
        return RunStatus.CRASHED, with_log(known, _taken(known))
    return RunStatus.CRASHED, known.backend.failed(known, returncode)


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
    return RunStatus.CRASHED, with_log(known, message)


def _cancelled(known: Known) -> tuple[RunStatus, RankError]:
    state, needed = known.state, known.needed
    if known.submission.stopped:
        return _stopped(known)
    if known.submission.cancelled:
        by = known.submission.cancelled
    elif needed is not None and needed.status is not RunStatus.FINISHED:
        # Slurm's --kill-on-invalid-dep; some of its versions show it only like this.
        return RunStatus.SKIPPED, _error(skipped(known.job, known.folder, needed))
    elif state.reason.startswith("by "):
        by = f"cancelled {state.reason} (a user's number)"
    else:
        by = "cancelled, not by converge"
        needs = state.end is JobEnd.NEEDED
        by += f" ({known.backend.name}: {state.reason})" if needs else ""
    return RunStatus.CANCELLED, RankError(None, f"{by}, {where(known)}")


def _taken(known: Known) -> str:
    """``Slurm: NODE_FAIL (reason) on node2, after step 5 of 20``."""
    state = known.state
    reason = f" ({state.reason})" if state.reason not in ("", "None", state.word) else ""
    nodes = f" on {state.nodes}" if state.nodes else ""
    return f"{known.backend.name}: {state.word}{reason}{nodes}, {where(known)}"


def where(known: Known) -> str:
    """The last finished step of the job, if its ranks say it."""
    if curves_of(known.job, known.folder) is not None:
        return "while the program ran"
    last = last_line(known.folder, in_passes=comes_in_passes(known.job))
    if last is None:
        return "before its first step was finished"
    return f"after step {last.step} of {known.job.steps}"


def with_log(known: Known, message: str) -> RankError:
    """An error with the end of rank 0's log, else of its launcher's or the script's output."""
    logs = newest_call_logs(known.folder / LOGS)
    texts = (read for each in logs for read in (rank_log(each, 0), _of_launcher(known, each)))
    text = next(filter(None, texts), "")
    if not text and known.backend.script_log is not None:
        text = log_tail(known.folder / known.backend.script_log)
    return RankError(None, message, text)


def _of_launcher(known: Known, logs: Path) -> str:
    """The end of a launcher's log in which the output of its ranks is, too."""
    own = trainer_of(known.job.spec).own_rank_code
    return "" if own else launcher_tail(logs)


def of_segment(known: Known, error: RankError) -> RankError:
    """The error of a call, in an elastic set with its segment."""
    job, logs = known.job, newest_call_logs(known.folder / LOGS)
    number = call_number(logs[0]) if logs else 0
    if not comes_in_passes(job) or not 0 < number <= len(job.spec.segments):
        return error
    # Its script makes one call per segment, and is never requeued.
    problem = after(job, Call(number, segment=number - 1), CallOutcome(ended_well=False)).problem
    return replace(error, message=f"{problem}: {error.message}")


def unknown_end(known: Known, gone: str) -> str:
    """A sentence; ``gone`` says that nothing but ``ended.json`` could tell how the job ended."""
    if damage := damage_of_end(known.folder):
        return f"it is unknown how it ended, {where(known)}: {damage}"
    return f"{gone}, and its end was not recorded ({where(known)})"


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
