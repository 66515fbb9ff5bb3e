"""What happened to a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class RunStatus(StrEnum):
    FINISHED = "finished"
    CRASHED = "crashed"
    HUNG = "hung"
    """No step finished within a timeout."""
    TIMED_OUT = "timed out"
    """It ran into the time limit of a scheduler."""
    CANCELLED = "cancelled"
    """Somebody took it out of a scheduler's hands."""
    REFUSED = "refused"
    """A scheduler will never start it: what it asks for does not exist or is not allowed."""
    INTERRUPTED = "interrupted"
    SKIPPED = "skipped"
    """Something it needs did not finish."""


@dataclass(frozen=True, slots=True)
class RankError:
    """What the first failing rank said (torchelastic error file, else the end of its log)."""

    rank: int | None
    """None: no rank said it, but the harness, or the scheduler that ran the job."""
    message: str
    """One line: type and text of the exception."""
    traceback: str = ""

    @property
    def words(self) -> str:
        """The message, and whose it is: ``rank 3: ValueError: …``."""
        return self.message if self.rank is None else f"rank {self.rank}: {self.message}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What happened to a job. Written last, atomically: a run without one is unfinished."""

    name: str
    identity: str
    folder: Path
    status: RunStatus
    wall_s: float
    argv: tuple[str, ...]
    error: RankError | None = None
    requeues: int = 0
    """How often a scheduler began it again; ``wall_s`` is then that of its last life."""
    evidence: Mapping[str, str] | None = None
    """SHA-256 of every evidence file, by its path from the folder; None where an older harness
    recorded none."""
    sources: Mapping[str, str | None] = field(default_factory=dict)
    """Digest of every file, besides what the identity covers, that the run was made of."""
    reused: bool = False
    """True when an earlier run with this identity was taken instead of launching."""
