"""Events for an observer while jobs run: frozen values for a display or a log.

Each carries ``at``, seconds since 1970. A job's events are one of::

    Reused                                          an earlier run with its identity is used
    Queued (RunsElsewhere)? Started Step* Ended     it ran; ``record.status`` has the result
    Queued (RunsElsewhere)? Started Step* Retrying Started …  an infrastructure fault, then a retry
    Queued (RunsElsewhere)? Started Step* (GoingOn Step*)* Ended  segments, or restarts after faults
    Queued Ended                                    skipped: a job that it needs did not finish

On a cluster ``Queued`` means that the scheduler has accepted the job, ``Started`` that it runs, and
``GoingOn`` that it runs again. Jobs that were already in the queue have no ``Queued``, refused ones
have neither, and one that starts and ends between two polls has no ``Started``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from converge_harness.model import Job, RunRecord


@dataclass(frozen=True, slots=True)
class Preparing:
    """Slow preparations before jobs start."""

    at: float
    what: str
    """``starting torchtitan-0.3.0 once for all its ranks``, ``checking 14 configs`` …"""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something is not as requested, but the run continues."""

    at: float
    message: str


@dataclass(frozen=True, slots=True)
class Reused:
    at: float
    job: Job
    record: RunRecord


@dataclass(frozen=True, slots=True)
class Queued:
    at: float
    job: Job
    job_id: str = ""
    """The scheduler's job id."""
    to_create: bool = False
    """Whether it is only written, as an object of that name that somebody has to create."""


@dataclass(frozen=True, slots=True)
class RunsElsewhere:
    """Another converge process is running the same job; its result will be used."""

    at: float
    job: Job


@dataclass(frozen=True, slots=True)
class Started:
    at: float
    job: Job
    slots: tuple[int, ...]
    """GPU ids, or slot numbers on the CPU: one per rank; empty on a cluster."""
    argv: tuple[str, ...]
    attempt: int
    nodes: str = ""
    """Nodes of a cluster, in the scheduler's notation."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step ended."""

    at: float
    job: Job
    step: int
    loss: float | None
    elapsed_s: float
    """Seconds since the job was started, without those in which it waited for other runs."""
    eta_s: float | None
    """Seconds until its last step, at the pace so far; None until the pace is known."""


@dataclass(frozen=True, slots=True)
class Retrying:
    """The machine, not the training, failed before the first step: the job is started again."""

    at: float
    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A job in several passes continues with another call, in the same folder and slots."""

    at: float
    job: Job
    reason: str
    """The next segment, or a restart after a fault."""
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The ranks of a job wait until runs that it is compared with have come as far."""

    at: float
    job: Job
    step: int
    """Its last."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has a record: finished, crashed, hung or skipped."""

    at: float
    job: Job
    record: RunRecord


@dataclass(frozen=True, slots=True)
class Overview:
    """State of the whole matrix, about once a second while jobs run."""

    at: float
    done: int
    total: int
    running: tuple[str, ...]
    eta_s: float | None
    """Estimated seconds until the last job ends; None before any pace is known."""
    queued: int = 0
    """Jobs that wait in a scheduler's queue."""
    reason: str = ""
    """The scheduler's most frequent reason for waiting."""


Event: TypeAlias = (
    Preparing
    | Notice
    | Reused
    | Queued
    | RunsElsewhere
    | Started
    | Step
    | Retrying
    | GoingOn
    | Waiting
    | Ended
    | Overview
)
Observer: TypeAlias = Callable[[Event], None]
