"""What a usual gate would have said: the loss alone, within a fixed relative tolerance.

Not part of any verdict. Reports print it beside ours to show what such gates let pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.judge.curves import pair, relative_difference
from harness.model import Evidence


@dataclass(frozen=True, slots=True)
class LossGate:
    """The answer of a loss-only gate."""

    passes: bool
    measured: float
    """Largest relative loss difference; infinite when a loss is not finite."""
    limit: float
    step: int | None
    """Where it was largest; None when the runs have no step in common."""


def loss_only_gate(control: Evidence, test: Evidence, rel: float = 0.01) -> LossGate:
    """Compare reported losses at the common steps; without any, nothing passes."""
    curves = pair(test, control, "loss")
    if not curves.steps.size:
        return LossGate(passes=False, measured=float("inf"), limit=rel, step=None)
    difference = relative_difference(curves.test, curves.control)
    worst = int(difference.argmax())
    measured = float(difference[worst])
    return LossGate(measured <= rel, measured, rel, int(curves.steps[worst]))
