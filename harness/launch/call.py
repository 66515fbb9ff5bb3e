"""One torchrun call of a run while its processes run: an agent per node."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.trainers import Call, Rendezvous

_LINGER_S = 10.0
"""A node may go on so long after another has ended, or training is complete: a surviving agent
can hang in torchrun's exit barrier."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class Agent:
    """torchrun's agent on one node, whose ranks are found by the folder that they work in."""

    process: subprocess.Popen[bytes]
    folder: Path
    """Working directory; of the first node, and of a program of the user's, the run folder."""
    logs: Path
    lost: bool = False
    """Killed by a fault of the script."""


@dataclass(slots=True)
class RunningCall:
    """A started call: its agents, and what of the run happened in it."""

    call: Call
    argv: tuple[str, ...]
    """The torchrun call of the first node as a user would type it."""
    meeting: Rendezvous
    """Where its agents meet."""
    agents: list[Agent]
    """By node."""
    faults_before: frozenset[int] = frozenset()
    """Faults of the script that had struck when it started."""
    started: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=_now)
    ended_at: str | None = None
    steps: int = 0
    """Lines of steps so far."""
    hangs_since: float | None = None
    """When a rank was first seen to hang by the script."""
    _lingers_since: float | None = None

    @property
    def left(self) -> list[Agent]:
        """Agents of the nodes that no fault of the script took."""
        return [agent for agent in self.agents if not agent.lost]

    @property
    def targets(self) -> list[tuple[subprocess.Popen[bytes], Path]]:
        """As ``processes.end_all`` wants them."""
        return [(agent.process, agent.folder) for agent in self.agents]

    @property
    def returncode(self) -> int:
        """0, or that of the first node that ended with an error, once the call is over."""
        codes = (agent.process.returncode for agent in self.left)
        return next((code for code in codes if code), 0)

    def is_over(self, *, complete: bool) -> bool:
        """Whether its agents have ended, or nothing will come of those that have not.

        ``complete``: training has come to its end.
        """
        running = [agent.process.poll() is None for agent in self.left]
        if not any(running):
            return True
        if len(self.agents) == 1 or (all(running) and not complete):
            return False
        if self._lingers_since is None:
            self._lingers_since = time.monotonic()
        return time.monotonic() - self._lingers_since > _LINGER_S

    def note_end(self) -> None:
        """No process of it is left."""
        self.ended_at = self.ended_at or _now()

    def facts(self) -> dict[str, Any]:
        """What ``record.json`` says of it."""
        return {
            "argv": list(self.argv),
            "segment": self.call.segment,
            "nodes": self.call.nodes,
            "started": self.started_at,
            "ended": self.ended_at,
            "returncode": self.returncode,
        }
