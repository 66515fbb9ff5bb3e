"""The interface of a scheduler: submit, poll, cancel, and the states of a job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Phase(StrEnum):
    """Where a job is in a scheduler."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    """It ended; ``JobState.word`` says how."""
    UNKNOWN = "unknown"
    """The scheduler does not know it any more; only the run folder can say more."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state according to the scheduler."""

    phase: Phase
    word: str = ""
    """The scheduler's word: ``PENDING``, ``TIMEOUT``, ``NODE_FAIL`` …"""
    reason: str = ""
    """The scheduler's reason, such as ``DependencyNeverSatisfied``; empty if it gives none."""
    never: bool = False
    """Whether a pending job can never start."""
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


class Backend(Protocol):
    """A scheduler. Every method raises ClusterError if it cannot be reached."""

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
