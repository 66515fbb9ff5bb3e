"""The interface of a scheduler, and what it says of a job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from converge_harness.launch.scheduler.submission import Submission
from converge_harness.model import Cluster, Job, RankError, RunRecord
from converge_harness.trainers import RANK_MODULE


class Phase(StrEnum):
    """Where a job is in a scheduler."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    """It ended; ``JobState.end`` says how."""
    UNKNOWN = "unknown"
    """The scheduler does not know it any more; only the run folder can say more."""


class NeverStarts(StrEnum):
    """Why a pending job can never start."""

    NEEDED = "needed"
    """A job that had to succeed first did not."""
    REQUEUES = "requeues"
    """It was requeued more often than the cluster allows."""
    LAUNCH = "launch"
    """It could not be launched, was requeued, and is held until somebody releases it."""
    REQUEST = "request"
    """It requests what it can never get."""


class JobEnd(StrEnum):
    """How a job ended, according to the scheduler."""

    BY_CODE = "by code"
    """As its exit code says; also if the scheduler does not know."""
    FAILED = "failed"
    TIME_IS_UP = "time is up"
    TAKEN_AWAY = "taken away"
    """It lost nodes or memory. The ranks' logs have no error then, or only a consequence."""
    CANCELLED = "cancelled"
    NEEDED = "needed"
    """Cancelled, because a job that had to succeed first did not."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state according to the scheduler."""

    phase: Phase
    word: str = ""
    """The scheduler's word, for people: ``PENDING``, ``TIMEOUT``, ``NODE_FAIL`` …"""
    reason: str = ""
    """The scheduler's reason, such as ``DependencyNeverSatisfied``; empty if it gives none.

    Of a job that a user has cancelled: ``by`` and the user's number.
    """
    never: NeverStarts | None = None
    """Why a pending job can never start; None: it can."""
    end: JobEnd = JobEnd.BY_CODE
    """How it ended, if it did."""
    paused: bool = False
    """Whether its ranks may not run although its phase is running: suspended, or ending."""
    restarts: int = 0
    """How often it has been requeued."""
    exit_code: int | None = None
    """Exit code of the script; None before its end, or if a signal ended it."""
    ran_s: float | None = None
    """Wall time since its last start, in seconds; None if unknown."""
    nodes: str = ""
    """The nodes on which it runs or ran, in the scheduler's notation."""
    name: str = ""
    """Name under which it was submitted; empty if unknown. Schedulers reuse ids."""


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A job whose script is to be written."""

    job: Job
    folder: Path
    """Its run folder, which has ``job.json``."""
    cluster: Cluster
    experiment: str
    """Name of the experiment, for people who read the script."""
    rank_module: str = RANK_MODULE
    continues_after: int | None = None
    """The number of the last call of an earlier job of the run, from whose newest checkpoint this
    one continues; None: it starts anew."""
    data: Path | None = None
    """The folder of its corpus."""

    @property
    def continues(self) -> bool:
        """Whether it continues from a checkpoint of an earlier job."""
        return self.continues_after is not None


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A job to submit."""

    script: Path
    """The batch script, with all requested resources."""
    name: str
    """Name by which the job is found again: it ends in the job's identity."""
    after_ok: tuple[str, ...] = ()
    """Ids of jobs that must succeed first; if one fails, the job is never started."""
    after_any: tuple[str, ...] = ()
    """Ids of jobs that must be over first, however they end."""
    perhaps_there: bool = False
    """Whether an earlier process may have died between submitting it and recording its id: then a
    waiting or running job of that name is taken for it.
    """


class Refused(Exception):  # noqa: N818 - the scheduler's answer
    """The scheduler refuses a job; the message is its own."""

    def __init__(self, message: str, *, for_now: bool = False) -> None:
        super().__init__(message)
        self.for_now = for_now
        """Whether it may accept the job later (too many jobs queued)."""


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that is known about a submitted job."""

    job: Job
    folder: Path
    submission: Submission
    state: JobState
    cluster: Cluster
    backend: Backend
    """The scheduler that has the job."""
    needed: RunRecord | None = None
    """Record of the seed-checkpoint job from which it starts; None if it needs none, or if that job
    is not over.
    """

    @property
    def argv(self) -> tuple[str, ...]:
        """The command that submits the job, without its dependencies."""
        return self.backend.submit_argv(self.folder)


class Backend(Protocol):
    """A scheduler: Slurm (``launch/slurm/``), or files for Kubernetes (``launch/kubernetes/``).

    ``submit``, ``poll`` and ``cancel`` raise ClusterError if the scheduler cannot be reached. All
    others ask nobody.
    """

    name: ClassVar[str]
    """The scheduler's name in sentences."""
    to_create: ClassVar[bool]
    """Whether jobs are only written, as objects that somebody has to create."""
    queue_command: ClassVar[str]
    """The command that shows jobs to people."""
    script_log: ClassVar[str | None]
    """The file in a run folder with the script's output; None: there is none."""
    ordinary_reasons: ClassVar[frozenset[str]]
    """Normal reasons for waiting, which are not reported."""

    def submit(self, request: SubmitRequest) -> str:
        """Submit a job; return its id.

        Raises Refused if the scheduler refuses it.
        """
        ...

    def poll(self, ids: Collection[str]) -> Mapping[str, JobState]:
        """The states of all these jobs, with one query."""
        ...

    def cancel(self, ids: Collection[str]) -> None:
        """Cancel these jobs, running or waiting; unknown ones are already over."""
        ...

    def files(self, request: ScriptRequest) -> dict[str, str]:
        """What a job's run folder needs before it is submitted: texts by file name.

        Raises ConfigError when the ranks do not fill nodes, and when the scheduler would refuse it.
        """
        ...

    def submit_argv(self, folder: Path) -> tuple[str, ...]:
        """The command that submits the job of a run folder by hand, without its dependencies."""
        ...

    def cancel_argv(self, cluster: Cluster) -> tuple[str, ...]:
        """The command that cancels jobs by hand, without their ids."""
        ...

    def with_keys(self, words: str, cluster: Cluster) -> str:
        """A refusal with the keys of ``[cluster]`` that it is about, if these are known."""
        ...

    def failed(self, known: Known, returncode: int | None) -> RankError:
        """The error of a job that failed; ``returncode``: of its script, None if unknown.

        It is that of the rank that failed first, if a rank's log has one.
        """
        ...
