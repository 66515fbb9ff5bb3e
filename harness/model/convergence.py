"""When runs reach a target, as MLPerf Training states it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReferencePoint:
    """A reference convergence point: how long the reference trains at one global batch size."""

    name: str
    benchmark: str
    batch_size: int
    """Global, in samples."""
    lengths: tuple[float, ...]
    """Samples (of some benchmarks epochs) until each run was at its target, in any order."""


@dataclass(frozen=True, slots=True)
class Convergence:
    """When one run of a submission was at its target."""

    name: str
    source: str
    benchmark: str
    batch_size: int
    """Global, in samples."""
    length: float
    """Samples or epochs, as the reference counts; infinity for a run that never was."""
