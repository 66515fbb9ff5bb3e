"""A trainer that is not torchtitan: any program, and where its evidence is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class RankLauncher(StrEnum):
    """What starts the ranks of a command trainer: ``[trainer] launcher``."""

    TORCHRUN = "torchrun"
    COMPOSER = "composer"
    DEEPSPEED = "deepspeed"
    MPIRUN = "mpirun"
    NONE = "none"
    """Nothing: the template is the whole argv, and starts its ranks itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a set's program is called, and what it leaves.

    Everything here changes numbers or what is read as evidence, and counts to the identity of a
    job, but for ``folder``.
    """

    argv: tuple[str, ...]
    """The template: what follows the launcher's own options, or with ``NONE`` the whole argv. Each
    entry is one argument, in which ``{name}`` stands for a value (docs/any-trainer.md); ``{{`` and
    ``}}`` are braces. No shell ever sees it."""
    folder: Path
    """Absolute: where the program is started."""
    launcher: RankLauncher = RankLauncher.TORCHRUN
    probed: bool = True
    """Whether the program calls ``harness.probe``, which then leaves all evidence; else it leaves a
    curve of its own, and that is all there is."""
    curves: str | None = None
    """Template of the path of that curve, ``{output}/…``, in any format that ``converge compare``
    reads; None for a probed program."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Signal, or ``step``, to its name in the curve; others are found by their known names."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its ranks are given beside the harness's environment; values are templates."""
    sources: tuple[Path, ...] = ()
    """Absolute paths of the files whose bytes count to the identity: those of the template that are
    there, and those that the file names (``files``)."""
