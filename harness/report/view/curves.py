"""Curves for drawing: the signals of a run, and what the judge compared of two."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from converge_harness.judge import CurveDifference, SignalSeries, whole_series
from converge_harness.model import Evidence, Floats, Integers


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Values over steps, of equal length; NaN where a run left nothing or left NaN.

    Plain sequences passed to it become arrays. Equal to a curve of the same numbers.
    """

    steps: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Shape (steps,), increasing."""
    values: Floats = field(default_factory=lambda: np.empty(0))
    """Shape (steps,)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", np.asarray(self.steps, dtype=np.int64))
        object.__setattr__(self, "values", np.asarray(self.values, dtype=np.float64))

    def __bool__(self) -> bool:
        return bool(np.isfinite(self.values).any())

    def __len__(self) -> int:
        return int(self.steps.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Curve):
            return NotImplemented
        same_steps = np.array_equal(self.steps, other.steps)
        return same_steps and np.array_equal(self.values, other.values, equal_nan=True)

    def __hash__(self) -> int:
        # Of the steps only: equal values may have different bits (zeros and NaN have signs).
        return hash(self.steps.tobytes())


@dataclass(frozen=True, slots=True)
class Comparison:
    """One signal of a run against its control."""

    difference: Curve = field(default_factory=Curve)
    """Relative difference, positive where the run is above its control."""
    ratio: Curve = field(default_factory=Curve)
    limit: Curve = field(default_factory=Curve)
    """Largest allowed relative difference per step; empty where none is known."""

    @classmethod
    def of(cls, found: CurveDifference, limit: Floats | None = None) -> Comparison:
        """What the judge found; ``limit`` has the shape of ``found.steps``."""
        return cls(
            Curve(found.steps, found.difference),
            Curve(found.steps, found.ratio),
            Curve() if limit is None else Curve(found.steps, limit),
        )


def curve_of(series: SignalSeries) -> Curve:
    """The same values, for drawing."""
    return Curve(series.steps, series.values)


def signal_curve(evidence: Evidence, signal: str) -> Curve:
    """A signal as the run left it; empty when the run does not have it at all."""
    return curve_of(whole_series(evidence, signal))
