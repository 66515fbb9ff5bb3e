"""References for later runs: goldens, and MLPerf's reference convergence points.

A golden is a stored control that somebody has blessed: runs are judged against it without running
it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converge_harness.model.experiment import Precision, SetSpec
from converge_harness.model.plan import Toolchain

GOLDENS = "baselines"
"""The folder of a project's goldens, each in a folder ``baselines/NAME``."""


@dataclass(frozen=True, slots=True)
class Blessing:
    """Who declared a control correct, when and why."""

    author: str
    reason: str
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class Golden:
    """A blessed control. Its folder is a run folder with nothing but evidence."""

    name: str
    folder: Path
    identity: str
    """Of the control's job."""
    spec: SetSpec
    """The set that its ranks trained."""
    precision: Precision
    toolchain: Toolchain
    """With the versions of that time; its Python may no longer exist."""
    frozen: int
    """Number of frozen steps of the control."""
    reference: tuple[Path, str] | None
    """Folder and identity of the control in float32; None if the golden has none."""
    facts: Mapping[str, Any]
    """The inputs of the identity, as JSON values."""
    blessing: Blessing

    @property
    def text(self) -> str:
        """``golden nightly, blessed by ada on 2026-11-22: first release``."""
        by = self.blessing
        return f"golden {self.name}, blessed by {by.author} on {by.date[:10]}: {by.reason}"


@dataclass(frozen=True, slots=True)
class ReferencePoint:
    """A reference convergence point: how long the reference trains with one global batch size."""

    name: str
    benchmark: str
    batch_size: int
    """Global, in samples."""
    lengths: tuple[float, ...]
    """Samples (in some benchmarks epochs) until each run reached its target, in any order."""


@dataclass(frozen=True, slots=True)
class Convergence:
    """When one run of a submission reached its target."""

    name: str
    source: str
    benchmark: str
    batch_size: int
    """Global, in samples."""
    length: float
    """Samples or epochs, as in the reference; infinity for a run that never reached it."""
