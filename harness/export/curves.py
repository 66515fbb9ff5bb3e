"""What goes into other tools: the curves of every run, and their distance to the control; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from harness.model import Evidence, Floats, Integers, Role

DIFFERENCE = "difference"
LIMIT = "limit"
"""Tags are a signal's own name (``loss``, ``grad_norm``, ``lr`` …), or one of these, a slash and
the signal's name."""
_TIME = "seconds"


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Values over steps; steps at which there is none are left out."""

    steps: Integers
    """Shape (points,)."""
    values: Floats
    """Shape (points,): may be NaN or infinite, where a run left that."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportedRun:
    """One control, repeat or test set, as another tool shows it."""

    name: str
    role: Role
    curves: Mapping[str, Points]
    """By tag."""
    seconds: Mapping[int, float]
    """Since the run's training began, by step."""
    facts: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Degrees, toolchain, verdict …, for tools that list runs by such."""


def exported(
    evidence: Evidence,
    role: Role,
    *,
    differences: Mapping[str, Points],
    limits: Mapping[str, Points],
    facts: Mapping[str, str | int | float | None],
) -> ExportedRun:
    """A run with all that it left, and what it was judged by.

    ``differences`` and ``limits`` are relative to the control's values, by signal.
    """
    curves = {
        signal: Points(evidence.steps[column.present], column.values[column.present])
        for signal, column in evidence.signals.items()
        if signal != _TIME
    }
    for tag, found in ((DIFFERENCE, differences), (LIMIT, limits)):
        curves.update({f"{tag}/{signal}": points for signal, points in found.items()})
    return ExportedRun(
        name=evidence.name,
        role=role,
        curves={tag: points for tag, points in curves.items() if points.steps.size},
        seconds=_seconds(evidence),
        facts=facts,
    )


def _seconds(evidence: Evidence) -> dict[int, float]:
    times = evidence.signals.get(_TIME)
    if times is None:
        return {}
    known = times.present & np.isfinite(times.values)
    return dict(zip(evidence.steps[known].tolist(), times.values[known].tolist(), strict=True))
