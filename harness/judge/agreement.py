"""Whether what a run reports is what its own probe recomputed, step by step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.judge.curves import relative_difference, series
from harness.judge.floors import METRIC_AGREEMENT
from harness.model import Evidence, Limit


class Agreement(NamedTuple):
    """Reported against recomputed, at the steps that have both."""

    signal: str
    steps: tuple[int, ...]
    reported: tuple[float, ...]
    recomputed: tuple[float, ...]
    difference: tuple[float, ...]
    limit: Limit

    @property
    def outside(self) -> tuple[int, ...]:
        pairs = zip(self.steps, self.difference, strict=True)
        return tuple(step for step, difference in pairs if not difference <= self.limit.value)

    @property
    def worst(self) -> int:
        """Index of the largest difference."""
        return int(np.argmax(self.difference))


def agreement(evidence: Evidence, signal: str) -> Agreement | None:
    """Compare a reported signal (``loss`` or ``grad_norm``) with its recomputation.

    None when the run lacks one of them.
    """
    reported, recomputed = series(evidence, signal), series(evidence, f"{signal}_recomputed")
    steps = tuple(step for step in reported if step in recomputed)
    if not steps:
        return None
    said = np.array([reported[step] for step in steps])
    found = np.array([recomputed[step] for step in steps])
    limit = METRIC_AGREEMENT[evidence.precision][signal]
    return Agreement(
        signal=signal,
        steps=steps,
        reported=tuple(said.tolist()),
        recomputed=tuple(found.tolist()),
        difference=tuple(relative_difference(said, found).tolist()),
        limit=Limit(limit, f"rounding of a reported {signal} in {evidence.precision.value}"),
    )
