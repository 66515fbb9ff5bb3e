"""Finds the trainer of a set by its kind; a trainer's package is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from harness.model import DEFAULT_TRAINER, SetSpec
from harness.trainers.base import Trainer

_MODULES = {
    "torchtitan": "harness.trainers.torchtitan",
    "command": "harness.trainers.command",
}
"""Kind to the module that has its ``TRAINER``."""


def register(kind: str, module: str) -> None:
    """Have ``[trainer] kind`` stand for the ``TRAINER`` of a module.

    Raises ValueError where it stands for another already.
    """
    if _MODULES.setdefault(kind, module) != module:
        raise ValueError(f"trainer {kind!r} is already {_MODULES[kind]}")


def kinds() -> tuple[str, ...]:
    """All that ``[trainer] kind`` can be, in the order in which they were registered."""
    return tuple(_MODULES)


@cache
def trainer_of_kind(kind: str) -> Trainer:
    """The trainer; raises KeyError for a kind that nobody has registered."""
    found: Trainer = importlib.import_module(_MODULES[kind]).TRAINER
    return found


def trainer_of(spec: SetSpec) -> Trainer:
    """The trainer of a set."""
    return trainer_of_kind(spec.trainer.kind)


def trainer_of_document(job: Mapping[str, Any]) -> Trainer:
    """The trainer of a ``job.json``; those of torchtitan and of commands do not name it.

    Raises KeyError for one that nobody has registered.
    """
    unnamed = DEFAULT_TRAINER if job.get("command") is None else "command"
    return trainer_of_kind(job.get("trainer", unnamed))
