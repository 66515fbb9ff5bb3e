"""Whether what a run reports is what its own probe recomputed, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from converge_harness.judge.compare.curves import common_steps, relative_difference, series
from converge_harness.judge.compare.floors import COARSE_NORM_AGREEMENT, METRIC_AGREEMENT, spacing
from converge_harness.model import Evidence, Floats, Integers, Limit, Precision


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


_FEWEST_STEPS = 3
"""Least variation of a ratio that counts as varying."""
_MOSTLY = 0.9
"""Least share of the steps at which the two losses differ: they may cross."""


def agreement(evidence: Evidence, signal: str) -> Agreement | None:
    """Compare a reported signal (``loss`` or ``grad_norm``) with its recomputation.

    None when the run lacks one of them.
    """
    reported, recomputed = series(evidence, signal), series(evidence, f"{signal}_recomputed")
    steps, ours, theirs = common_steps(reported.steps, recomputed.steps)
    if not steps.size:
        return None
    said, found = reported.values[ours], recomputed.values[theirs]
    limit, stored = metric_agreement(evidence, signal)
    return Agreement(
        signal=signal,
        steps=steps,
        reported=said,
        recomputed=found,
        difference=relative_difference(said, found),
        limit=Limit(limit, f"rounding of a reported {signal}{stored}"),
    )


def metric_agreement(evidence: Evidence, signal: str) -> tuple[float, str]:
    """How far a reported signal may be from its recomputation, and a clause on the data type."""
    stored = evidence.in_force.param_dtype if evidence.in_force else None
    coarse = spacing(evidence, 0.0) > 0
    # Where it is not known, as of imported curves, it may be.
    coarse |= stored is None and evidence.precision is not Precision.FP32
    if signal == "grad_norm" and coarse:
        return COARSE_NORM_AGREEMENT, f" of parameters in {stored or 'low precision'}"
    return METRIC_AGREEMENT[signal], ""


def other_objective(test: Evidence, control: Evidence) -> bool:
    """Whether both runs minimise another loss than the cross entropy that the probe recomputes.

    With label smoothing, say, or an auxiliary loss the reported value is the recomputed one times a
    factor that changes during training. A metric that is summed wrongly is a fixed multiple, and
    wrong in only one of the runs or in different ways.
    """
    return _varies(test) and _varies(control)


def _varies(evidence: Evidence) -> bool:
    """Whether the reported loss differs from the recomputed one by a factor that changes."""
    compared = agreement(evidence, "loss")
    if compared is None or compared.steps.size < _FEWEST_STEPS:
        return False
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = compared.reported / compared.recomputed
    if not np.all(np.isfinite(ratio)) or compared.outside.size < _MOSTLY * compared.steps.size:
        return False
    middle = float(np.median(ratio))
    return bool(np.abs(ratio - middle).max() > compared.limit.value * abs(middle))
