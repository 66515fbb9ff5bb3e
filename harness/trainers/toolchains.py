"""Toolchains as their trainers find them."""

from __future__ import annotations

from pathlib import Path

from harness.model import TORCHTITAN, Toolchain, TrainerSpec
from harness.trainers.registry import trainer_of_kind


def find_toolchain(
    name: str, root: Path | None = None, trainer: TrainerSpec | None = None
) -> Toolchain:
    """A toolchain by name, with the versions of what matters in it.

    ``trainer`` is what trains in it; None: the default one.

    Raises:
        ToolchainError: it is not there, does not start, or lacks what the trainer needs.
    """
    trainer = trainer or TORCHTITAN
    return trainer_of_kind(trainer.kind).find_toolchain(name, root, trainer)


def assume_toolchain(
    name: str, root: Path | None = None, trainer: TrainerSpec | None = None
) -> Toolchain:
    """A toolchain as it will be once built, for plans that launch nothing."""
    trainer = trainer or TORCHTITAN
    return trainer_of_kind(trainer.kind).assume_toolchain(name, root, trainer)
