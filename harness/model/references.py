"""What later runs are judged against: a golden, and MLPerf's reference convergence points.

A golden is a control that somebody has blessed: it is judged against without running again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converge_harness.model.experiment import Precision, SetSpec
from converge_harness.model.plan import Toolchain

GOLDENS = "baselines"
"""The folder of a project's goldens: each is a folder ``baselines/NAME``."""


@dataclass(frozen=True, slots=True)
class Blessing:
    """Who took a control for right, when and why."""

    author: str
    reason: str
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class Golden:
    """A blessed control. Its folder is a run folder, of which nothing but evidence is left."""

    name: str
    folder: Path
    identity: str
    """Of the control's job."""
    spec: SetSpec
    """What its ranks were told to be."""
    precision: Precision
    toolchain: Toolchain
    """With the versions of then; its Python may be gone."""
    frozen: int
    """Frozen steps that the control made."""
    reference: tuple[Path, str] | None
    """Folder and identity of the control in float32; None where the golden has none."""
    facts: Mapping[str, Any]
    """All that the identity is a hash of, JSON values."""
    blessing: Blessing

    @property
    def words(self) -> str:
        """``golden nightly, blessed by ada on 2026-11-22: first release``."""
        told = self.blessing
        return f"golden {self.name}, blessed by {told.author} on {told.date[:10]}: {told.reason}"


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
