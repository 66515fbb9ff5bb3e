"""What other projects' gates compare: reported loss and grad norm, as precisely as logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from converge_harness.model import Evidence
from converge_harness.readers import read_run


@dataclass(frozen=True, slots=True)
class Curve:
    """Reported values by step, each rounded to float32 as TensorBoard keeps it.

    Steps that the run did not log are missing; NaN is a logged value.
    """

    loss: Mapping[int, float]
    grad_norm: Mapping[int, float] = field(default_factory=dict)


def read_curve(folder: Path) -> Curve:
    """The curve of a run folder of converge; empty for a run without a finished step.

    Raises EvidenceError and StoreError as :func:`converge_harness.readers.read_run` does.
    """
    evidence = read_run(folder)
    return Curve(_logged(evidence, "loss"), _logged(evidence, "grad_norm"))


def largest_difference(curve: Curve, control: Curve) -> float | None:
    """The largest relative difference of a loss to the control's; NaN if one is not a number.

    None without a step that both have.
    """
    shared = [step for step in control.loss if step in curve.loss]
    if not shared:
        return None
    mine = np.array([curve.loss[step] for step in shared])
    golden = np.array([control.loss[step] for step in shared])
    return float(np.max(np.abs(mine - golden) / np.abs(golden)))


def _logged(evidence: Evidence, signal: str) -> dict[int, float]:
    column = evidence.signals.get(signal)
    if column is None:
        return {}
    pairs = zip(evidence.steps.tolist(), column, strict=True)
    return {step: float(np.float32(value)) for step, value in pairs if value is not None}
