"""The error of a job whose pods failed, where converge cannot ask how it ended."""

from __future__ import annotations

from converge_harness.launch.kubernetes.objects import kubernetes_of, logs_command, object_name
from converge_harness.launch.scheduler.backend import Known
from converge_harness.launch.scheduler.batch_step import TERMINATED
from converge_harness.launch.scheduler.result import of_segment, unknown_end, where, with_log
from converge_harness.model import RankError
from converge_harness.run_folder.layout import JOB_SCRIPT, LOGS, newest_call_logs
from converge_harness.trainers import trainer_of
from converge_harness.trainers.failure import has_failed_rank


def failed_pods(known: Known, returncode: int | None) -> RankError:
    """The error of the rank that failed first; for an elastic set, with its segment."""
    job, logs = known.job, newest_call_logs(known.folder / LOGS)
    site, trainer = kubernetes_of(known.cluster), trainer_of(job.spec)
    name = known.submission.job_id or object_name(job)
    if returncode is None:
        return with_log(known, unknown_end(known, f"{JOB_SCRIPT} of JobSet {name} is gone"))
    error = trainer.error(logs, logs, returncode, None)
    # Without an error of a rank, torchrun's own last line would stand for rank 0.
    of_rank = error.rank is not None and (not trainer.own_rank_code or has_failed_rank(*logs))
    if returncode == TERMINATED and not of_rank:
        message = (
            "its first pod was ended by SIGTERM (deleted, evicted, time limit, or another pod of "
            f"the job failed), {where(known)}: see kubectl events --namespace={site.namespace}"
        )
        return with_log(known, message)
    if not logs:
        message = f"failed with exit code {returncode} before its ranks started"
        return RankError(None, f"{message}: see {logs_command(site.namespace, name)}")
    return of_segment(known, error)
