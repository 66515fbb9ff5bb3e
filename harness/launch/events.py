"""What an observer is told while jobs run: frozen values for a renderer or a log.

Each carries ``at``, seconds since 1970. A job's events are one of::

    Reused                                          an earlier run with its identity is taken
    Queued (Waiting)? Started Step* Ended           it ran; ``record.status`` says how it went
    Queued (Waiting)? Started Step* Retrying Started …   an infrastructure fault, tried once more
    Queued (Waiting)? Started Step* (GoingOn Step*)* Ended  segments, or restarts after faults
    Queued Ended                                    skipped: what it needs did not finish

On a cluster ``Queued`` comes once a scheduler has taken the job, ``Started`` once it runs it, and
``GoingOn`` once it runs it again. Jobs that were in the queue before have no ``Queued``, refused
ones have neither, and one that starts and ends between two polls has no ``Started``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from converge_harness.model import Job, RunRecord


@dataclass(frozen=True, slots=True)
class Preparing:
    """Work before jobs start that takes a while."""

    at: float
    what: str
    """``starting torchtitan-0.3.0 once for all its ranks``, ``checking 14 configs`` …"""


@dataclass(frozen=True, slots=True)
class Notice:
    """Something is not as asked for, and the run goes on."""

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
    """A scheduler's."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Another harness runs this very job; its result will be taken."""

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
    """Of a cluster, as the scheduler writes them."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step ended."""

    at: float
    job: Job
    step: int
    loss: float | None
    elapsed_s: float
    """Since the job was started."""
    eta_s: float | None
    """Until its last step, at the pace so far; None until there is a pace."""


@dataclass(frozen=True, slots=True)
class Retrying:
    """The machine, not the training, failed before the first step: the job starts once more."""

    at: float
    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class GoingOn:
    """A job in several passes goes on with another torchrun call, in the same folder and slots."""

    at: float
    job: Job
    reason: str
    """The next segment, or a restart after a fault."""
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has its record: finished, crashed, hung or skipped."""

    at: float
    job: Job
    record: RunRecord


@dataclass(frozen=True, slots=True)
class Overview:
    """The whole matrix, about once a second while jobs run."""

    at: float
    done: int
    total: int
    running: tuple[str, ...]
    eta_s: float | None
    """Until the last job ends, as far as can be told; None before any pace is known."""
    queued: int = 0
    """Jobs that wait in a scheduler's queue."""
    reason: str = ""
    """Why most of them wait, in its word."""


Event: TypeAlias = (
    Preparing
    | Notice
    | Reused
    | Queued
    | Waiting
    | Started
    | Step
    | Retrying
    | GoingOn
    | Ended
    | Overview
)
Observer: TypeAlias = Callable[[Event], None]
