"""The error of a job that failed under Slurm, which may have forgotten it."""

from __future__ import annotations

from converge_harness.launch.scheduler.backend import Known, Phase
from converge_harness.launch.scheduler.batch_step import TERMINATED
from converge_harness.launch.scheduler.result import of_segment, unknown_end, where, with_log
from converge_harness.model import RankError
from converge_harness.run_folder.layout import LOGS, SLURM_LOG, newest_call_logs
from converge_harness.trainers import trainer_of


def failed_job(known: Known, returncode: int | None) -> RankError:
    """The error of the rank that failed first; for an elastic set, with its segment."""
    forgotten = known.state.phase is Phase.UNKNOWN
    if returncode is None and forgotten:
        gone = f"Slurm no longer knows job {known.submission.job_id}"
        return with_log(known, unknown_end(known, gone))
    if returncode == TERMINATED and forgotten:
        message = "was ended by SIGTERM (time limit, preemption, scancel): Slurm no longer says why"
        return with_log(known, f"{message}, {where(known)}")
    logs, script = newest_call_logs(known.folder / LOGS), known.folder / SLURM_LOG
    error = trainer_of(known.job.spec).error(logs, logs, returncode, script)
    return of_segment(known, error)
