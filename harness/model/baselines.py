"""Baselines: stored controls that somebody has blessed, by which runs are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converge_harness.model.experiment import Precision, SetSpec
from converge_harness.model.plan import Toolchain

BASELINES = "baselines"
"""The folder of a project's baselines, each in a folder ``baselines/NAME``."""


@dataclass(frozen=True, slots=True)
class Blessing:
    """Who declared a control correct, when and why."""

    author: str
    reason: str
    date: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class Baseline:
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
    """Folder and identity of the control in float32; None if the baseline has none."""
    facts: Mapping[str, Any]
    """The inputs of the identity, as JSON values."""
    blessing: Blessing

    @property
    def text(self) -> str:
        """``baseline nightly, blessed by ada on 2026-11-22: first release``."""
        by = self.blessing
        return f"baseline {self.name}, blessed by {by.author} on {by.date[:10]}: {by.reason}"
