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
    """It reached the time limit of a scheduler."""
    CANCELLED = "cancelled"
    """Somebody cancelled it in the scheduler."""
    REFUSED = "refused"
    """A scheduler will never start it: what it requests does not exist or is not allowed."""
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"
    """converge ended it before its last step, because its verdict was known."""
    SKIPPED = "skipped"
    """A job that it depends on did not finish."""


ENDED_WITH_0 = "every rank ended with exit code 0"
"""How the error of a run begins whose ranks end so before its last step."""


@dataclass(frozen=True, slots=True)
class RankError:
    """Error of the first failing rank (torchelastic error file, else the end of its log)."""

    rank: int | None
    """None: the message is converge's own or the scheduler's."""
    message: str
    """One line: type and text of the exception."""
    traceback: str = ""

    @property
    def text(self) -> str:
        """The message with its rank: ``rank 3: ValueError: …``."""
        return self.message if self.rank is None else f"rank {self.rank}: {self.message}"

    @property
    def port_taken(self) -> bool:
        """Whether it listens on a port that another process holds."""
        words = self.message.casefold()
        return "address already in use" in words or "eaddrinuse" in words


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
    """How often a scheduler restarted it; ``wall_s`` is then that of its last execution."""
    evidence: Mapping[str, str] | None = None
    """SHA-256 of every evidence file, by path relative to the folder; None if an older version
    recorded none.
    """
    sources: Mapping[str, str | None] = field(default_factory=dict)
    """Digest of every file that the run used and that its identity does not cover."""
    reused: bool = False
    """True if an earlier run with this identity was used instead of launching."""
