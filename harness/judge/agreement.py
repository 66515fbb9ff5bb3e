"""Whether what a run reports is what its own probe recomputed, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.judge.curves import common_steps, relative_difference, series
from harness.judge.floors import METRIC_AGREEMENT
from harness.model import Evidence, Floats, Integers, Limit


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """Reported against recomputed, at the steps that have both."""

    signal: str
    steps: Integers
    reported: Floats
    recomputed: Floats
    difference: Floats
    limit: Limit

    @property
    def outside(self) -> Integers:
        """Steps at which the two differ by more than the limit, or are not finite."""
        return self.steps[~(self.difference <= self.limit.value)]

    @property
    def worst(self) -> int:
        """Index of the largest difference."""
        return int(np.argmax(self.difference))


def agreement(evidence: Evidence, signal: str) -> Agreement | None:
    """Compare a reported signal (``loss`` or ``grad_norm``) with its recomputation.

    None when the run lacks one of them.
    """
    reported, recomputed = series(evidence, signal), series(evidence, f"{signal}_recomputed")
    steps, ours, theirs = common_steps(reported.steps, recomputed.steps)
    if not steps.size:
        return None
    said, found = reported.values[ours], recomputed.values[theirs]
    limit = METRIC_AGREEMENT[evidence.precision][signal]
    return Agreement(
        signal=signal,
        steps=steps,
        reported=said,
        recomputed=found,
        difference=relative_difference(said, found),
        limit=Limit(limit, f"rounding of a reported {signal} in {evidence.precision.value}"),
    )
