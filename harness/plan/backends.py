"""Which SPMD backend of torchtitan 0.3 a set trains by that names none."""

from __future__ import annotations

import re
from dataclasses import replace

from harness.model import SPMD_BACKEND, SetSpec, Toolchain
from harness.trainers import Trainer, trainer_of

SPMD_TYPES, PARTIAL_DTENSOR = "spmd_types", "partial_dtensor"
FIT_FOR_SPMD_TYPES = (2, 15)
"""The first torch on which torchtitan 0.3.0's own default was seen to train all parallelisms."""


def with_backend(spec: SetSpec, toolchain: Toolchain) -> SetSpec:
    """The set with its SPMD backend: what it names, else its train config, else the toolchain's."""
    trainer = trainer_of(spec)
    if spec.spmd_backend is not None or not trainer.features(toolchain).spmd_backends:
        return spec
    written = spec.setting(SPMD_BACKEND)
    backend = written if isinstance(written, str) else default_backend(trainer, toolchain)
    return replace(spec, spmd_backend=backend)


def default_backend(trainer: Trainer, toolchain: Toolchain) -> str | None:
    """What the toolchain's torch is fit for; of one that is not built yet, torchtitan's default."""
    if not trainer.features(toolchain).spmd_backends:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", toolchain.versions.get("torch", ""))
    if numbers is None:
        return SPMD_TYPES
    torch = (int(numbers[1]), int(numbers[2]))
    return SPMD_TYPES if torch >= FIT_FOR_SPMD_TYPES else PARTIAL_DTENSOR
