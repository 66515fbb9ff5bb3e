"""Objects in files as a scheduler: whoever has kubectl creates and deletes them.

What converge knows of a job is what its first pod has written into the run folder. A job whose pods
never started, or were killed, is therefore waited for until somebody says that it is over.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from converge_harness.launch.kubernetes.checking import require_valid
from converge_harness.launch.kubernetes.objects import (
    OBJECT,
    ROLE,
    delete_command,
    job_set,
    kubernetes_of,
    logs_command,
    object_name,
    object_text,
)
from converge_harness.launch.kubernetes.pod_script import pod_script
from converge_harness.launch.scheduler.backend import (
    JobEnd,
    JobState,
    Known,
    Phase,
    ScriptRequest,
    SubmitRequest,
)
from converge_harness.launch.scheduler.batch_step import TERMINATED
from converge_harness.launch.scheduler.result import of_segment, unknown_end, where, with_log
from converge_harness.launch.scheduler.script_end import has_ended, known_end
from converge_harness.launch.scheduler.submission import read_submission
from converge_harness.model import Cluster, RankError, Role
from converge_harness.run_folder.layout import (
    COMPILED,
    JOB_SCRIPT,
    LOGS,
    RECORD,
    calls_so_far,
    newest_call_logs,
)
from converge_harness.store import Store, atomic_write
from converge_harness.trainers import trainer_of
from converge_harness.trainers.failure import has_failed_rank

SEEDS, RUNS = "1-seed-checkpoints", "2-runs"
"""Folders of objects: those of the first have to be complete before others are created."""


@dataclass(frozen=True, slots=True)
class WrittenObjects:
    """The JobSets of a store."""

    name: ClassVar[str] = "Kubernetes"
    to_create: ClassVar[bool] = True
    queue_command: ClassVar[str] = "kubectl get jobsets"
    script_log: ClassVar[str | None] = None
    ordinary_reasons: ClassVar[frozenset[str]] = frozenset({""})

    store: Store
    objects: Path | None = None
    """The folder into which they are written; None where nothing is submitted."""

    def submit(self, request: SubmitRequest) -> str:
        """Write an object into the folder that says when to create it; return its name."""
        if self.objects is None:
            raise ValueError("there is no folder for objects")
        # A job that continues compiles anew, as under Slurm.
        shutil.rmtree(request.script.parent / COMPILED, ignore_errors=True)
        content = request.script.with_name(OBJECT).read_bytes()
        metadata = json.loads(content)["metadata"]
        when = SEEDS if metadata["annotations"][ROLE] == Role.SEED else RUNS
        atomic_write(self.objects / when / f"{metadata['name']}.json", content)
        return str(metadata["name"])

    def tidy(self) -> None:
        """Remove the objects of jobs that are over, or were cancelled: they must not start again.

        Raises StoreError.
        """
        folders = self.store.run_folders()
        for when in (SEEDS, RUNS) if self.objects is not None else ():
            for path in self.objects_in(when):
                folder = folders.get(_key(path.stem))
                if folder is not None and (folder / RECORD).is_file():
                    path.unlink()

    def objects_in(self, when: str) -> tuple[Path, ...]:
        """The objects in one of the two folders."""
        return (
            () if self.objects is None else tuple(sorted((self.objects / when).glob("cv-*.json")))
        )

    def poll(self, ids: Collection[str]) -> Mapping[str, JobState]:
        """The states of jobs, from the files in their run folders."""
        folders = self.store.run_folders()
        return {name: _state(folders.get(_key(name))) for name in ids}

    def cancel(self, ids: Collection[str]) -> None:
        """Keep jobs whose JobSets were deleted from starting again."""
        folders = self.store.run_folders()
        for name in ids:
            if folder := folders.get(_key(name)):
                (folder / JOB_SCRIPT).unlink(missing_ok=True)

    def files(self, request: ScriptRequest) -> dict[str, str]:
        """The script of a job's pods, and its object.

        Raises ConfigError when the ranks do not fill nodes, and when Kubernetes would refuse it.
        """
        script = pod_script(request)
        made = job_set(request)
        require_valid(made)
        return {JOB_SCRIPT: script, OBJECT: object_text(made)}

    def submit_argv(self, folder: Path) -> tuple[str, ...]:
        """The command that creates the object of a run folder."""
        return ("kubectl", "create", "-f", str(folder / OBJECT))

    def cancel_argv(self, cluster: Cluster) -> tuple[str, ...]:
        """The command that deletes objects, without their names."""
        return delete_command(kubernetes_of(cluster).namespace)

    def with_keys(self, words: str, cluster: Cluster) -> str:  # noqa: ARG002 - of the interface
        """The words as they are: Kubernetes answers whoever creates the object, never converge."""
        return words

    def failed(self, known: Known, returncode: int | None) -> RankError:
        """The error of the rank that failed first; for an elastic set, with its segment.

        Whatever else ended the job is not asked for, because converge cannot ask Kubernetes.
        """
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
                "its first pod was ended by SIGTERM (deleted, evicted, time limit, or another pod "
                f"of the job failed), {where(known)}: see kubectl events "
                f"--namespace={site.namespace}"
            )
            return with_log(known, message)
        if not logs:
            message = f"failed with exit code {returncode} before its ranks started"
            return RankError(None, f"{message}: see {logs_command(site.namespace, name)}")
        return of_segment(known, error)


def _key(name: str) -> str:
    """The key of a job's run folder, in which the name of its object ends."""
    return name.rpartition("-")[2]


def _state(folder: Path | None) -> JobState:
    if folder is None:
        return JobState(Phase.UNKNOWN)
    submission = read_submission(folder)
    if not has_ended(folder):
        if not (folder / JOB_SCRIPT).is_file():
            return JobState(Phase.UNKNOWN)
        before = submission.continues_after if submission else None
        started = calls_so_far(folder / LOGS) > (before or 0)
        return JobState(Phase.RUNNING if started else Phase.PENDING)
    if (ended := known_end(folder)) is None:
        return JobState(Phase.ENDED)  # its record says that the file is damaged
    cancelled = (
        ended.returncode == TERMINATED and submission is not None and bool(submission.cancelled)
    )
    return JobState(
        Phase.ENDED,
        word="CANCELLED" if cancelled else "",
        end=JobEnd.CANCELLED if cancelled else JobEnd.BY_CODE,
        exit_code=ended.returncode,
        ran_s=ended.ran_s,
    )
