"""What a scheduler must do for us: submit, poll and cancel, and how it describes a job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Phase(StrEnum):
    """Where a job is in a scheduler's hands."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    """However it ended: ``JobState.word`` says how."""
    UNKNOWN = "unknown"
    """The scheduler does not know it any more: the run folder has to tell."""


@dataclass(frozen=True, slots=True)
class JobState:
    """What a scheduler says of a job."""

    phase: Phase
    word: str = ""
    """The scheduler's own: ``PENDING``, ``TIMEOUT``, ``NODE_FAIL`` …"""
    reason: str = ""
    """Its reason, as ``DependencyNeverSatisfied``; empty when it gives none."""
    never: bool = False
    """Whether a pending job can never start."""
    restarts: int = 0
    """How often it has been requeued."""
    exit_code: int | None = None
    """Of the script; None before the end, or when a signal ended it."""
    ran_s: float | None = None
    """Wall time of its last start, in seconds; None when unknown."""
    nodes: str = ""
    """The nodes that it runs or ran on, as the scheduler writes them."""
    name: str = ""
    """Under which it was submitted; empty when unknown. Schedulers give ids again."""


@dataclass(frozen=True, slots=True)
class Request:
    """A job to be given to a scheduler."""

    script: Path
    """The batch script; it has all that the job asks for."""
    name: str
    """Under which the job is found again: it ends in the job's identity."""
    after_ok: tuple[str, ...] = ()
    """Ids of jobs that must have ended well before; if one does not, the job is never started."""
    after_any: tuple[str, ...] = ()
    """Ids of jobs that must be over before, however they end."""
    perhaps_there: bool = False
    """Whether a harness may have died between giving it away and writing its id down: a job of
    that name that waits or runs is then taken for it."""


class Refused(Exception):  # noqa: N818 - the scheduler's answer
    """A scheduler does not take a job. The message is its own, without a traceback."""

    def __init__(self, message: str, *, for_now: bool = False) -> None:
        super().__init__(message)
        self.for_now = for_now
        """Whether it may take the job later (too many jobs queued)."""


class Backend(Protocol):
    """A scheduler. Every function raises ClusterError when it cannot be reached."""

    def submit(self, request: Request) -> str:
        """Give a job to the scheduler; its id there.

        Raises Refused when it does not take the job.
        """
        ...

    def poll(self, ids: Collection[str]) -> Mapping[str, JobState]:
        """What it says of these jobs, every one of them, by one query."""
        ...

    def cancel(self, ids: Collection[str]) -> None:
        """Have these jobs ended, whether they run or wait; unknown ones are over already."""
        ...
