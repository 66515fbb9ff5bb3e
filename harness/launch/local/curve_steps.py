"""Which steps the growing curve of a program without the probe has, from look to look."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from converge_harness.errors import EvidenceError
from converge_harness.launch.options import StepsSoFar
from converge_harness.launch.progress import sizes

_READING_SHARE = 20
"""How many times as long as a look takes the next one waits: a long curve takes time to read."""


@dataclass(slots=True)
class CurveSteps:
    """The curve of one start, read again whenever it has grown."""

    path: Path
    """A file, or a folder of files."""
    columns: Mapping[str, str]
    read: StepsSoFar
    steps: range = range(0)
    """From its first step to the newest that was seen."""
    first_row_at: float | None = None
    """When its first step was seen; seconds since 1970."""
    grew_at: float = 0.0
    """When a look found that it had grown, by the monotonic clock."""
    _sizes: tuple[tuple[str, int], ...] = ()
    _seen: tuple[tuple[str, int], ...] = ()
    """The sizes when it was last understood."""
    _next_look: float = field(default_factory=time.monotonic)

    def look(self, *, is_over: bool = False) -> None:
        """Read the curve if it has grown and it is time to; ``is_over``: nobody writes it now.

        One that cannot be understood now, as while its first line is written, has no more steps
        than before; if it stays so, the judge says why.
        """
        began = time.monotonic()
        if began < self._next_look and not is_over:
            return
        now = sizes(self.path)
        if now != self._sizes:
            self._sizes, self.grew_at = now, began
        if now != self._seen or is_over:
            with suppress(EvidenceError):
                self.steps = self.read(self.path, self.columns) or self.steps
                self._seen = now
        if self.steps and self.first_row_at is None:
            self.first_row_at = time.time()
        self._next_look = time.monotonic() + _READING_SHARE * (time.monotonic() - began)
