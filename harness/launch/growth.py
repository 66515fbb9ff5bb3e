"""Whether a program that tells no steps still does something: what it writes grows."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_LOOK_EVERY_S = 0.5


@dataclass(slots=True)
class Growth:
    """Follows the curve of a program that is not probed, and what its ranks print."""

    curves: Path
    """A file, or a folder of files."""
    logs: Path
    grew_at: float = field(default_factory=time.monotonic)
    """When anything was last seen to have grown; at first the start."""
    begun: bool = False
    """Whether there is a curve."""
    _looked_at: float = 0.0
    _seen: tuple[tuple[str, int], ...] = ()

    def look(self) -> None:
        """See what has grown since the last look; looks no oftener than is of use."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        curve, printed = _sizes(self.curves), _sizes(self.logs)
        self.begun = bool(curve)
        if curve + printed != self._seen:
            self._seen, self.grew_at = curve + printed, now

    def overdue(self, startup_timeout_s: float, progress_timeout_s: float) -> str:
        """Which timeout has passed, as a sentence; empty when none has."""
        limit, key = (
            (progress_timeout_s, "progress_timeout_s")
            if self.begun
            else (startup_timeout_s, "startup_timeout_s")
        )
        if time.monotonic() - self.grew_at <= limit:
            return ""
        if self.begun:
            return f"neither its curve nor what its ranks print grew for {limit:g} s ({key})"
        return f"for {limit:g} s its ranks printed nothing, and there is no {self.curves} ({key})"


def _sizes(path: Path) -> tuple[tuple[str, int], ...]:
    """Every file at or below a path with its size; empty when there is none."""
    if path.is_dir():
        files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    else:
        files = [path]
    found = []
    for file in sorted(files):
        try:
            found.append((str(file), file.stat().st_size))
        except OSError:
            continue
    return tuple(found)
