"""What a gate on the loss alone would say of two runs, to show beside a verdict.

Gates in use compare only the loss, and allow it to differ by 1% to 5%.
"""

from __future__ import annotations

from dataclasses import dataclass

from converge_harness.judge.compare.curves import CurveDifference

LOSS_ONLY_LIMIT = 0.01
"""Largest relative difference of the loss that the gate allows: the strictest of those in use."""


@dataclass(frozen=True, slots=True)
class LossOnlyGate:
    """The gate's answer."""

    measured: float
    """Largest relative loss difference over the common steps; infinite when one is not finite."""
    limit: float = LOSS_ONLY_LIMIT

    @property
    def passes(self) -> bool:
        return self.measured <= self.limit


def loss_only_gate(loss: CurveDifference) -> LossOnlyGate | None:
    """The gate's answer to the losses of two runs; None without a common step."""
    return None if loss.largest is None else LossOnlyGate(loss.largest)
