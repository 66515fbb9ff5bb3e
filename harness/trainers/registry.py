"""Finds a trainer by its kind; its package is imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

from converge_harness.errors import Problem
from converge_harness.model import DEFAULT_TRAINER, SetSpec
from converge_harness.toml import Table, Where, validate
from converge_harness.trainers.base import Trainer
from converge_harness.trainers.table import TrainerTable

_MODULES = {
    "torchtitan": "converge_harness.trainers.torchtitan",
    "command": "converge_harness.trainers.command",
}
"""By kind, the module with its ``TRAINER``."""


def register(kind: str, module: str) -> None:
    """Register a module's ``TRAINER`` for a ``[trainer] kind``.

    Raises ValueError if the kind is already registered for another module.
    """
    if _MODULES.setdefault(kind, module) != module:
        raise ValueError(f"trainer {kind!r} is already {_MODULES[kind]}")


def kinds() -> tuple[str, ...]:
    """All values of ``[trainer] kind``, in the order of registration."""
    return tuple(_MODULES)


@cache
def trainer_of_kind(kind: str) -> Trainer:
    """The trainer; raises KeyError for an unknown kind."""
    found: Trainer = importlib.import_module(_MODULES[kind]).TRAINER
    return found


def trainer_of(spec: SetSpec) -> Trainer:
    """The trainer of a set."""
    return trainer_of_kind(spec.trainer.kind)


def trainer_of_document(job: Mapping[str, Any]) -> Trainer:
    """The trainer of a ``job.json``; those of torchtitan and of commands do not name it.

    Raises KeyError for an unknown kind.
    """
    unnamed = DEFAULT_TRAINER if job.get("command") is None else "command"
    return trainer_of_kind(job.get("trainer", unnamed))


# --------------------------------------------------------------- [trainer] of a file


def _is_registered(kind: str) -> str:
    if kind not in _MODULES:
        raise PydanticCustomError("choice", "is not known", {"valid": kinds()})
    return kind


class _KindOnly(Table):
    model_config = ConfigDict(extra="ignore")

    kind: Annotated[str, AfterValidator(_is_registered)] = DEFAULT_TRAINER


def read_trainer(table: dict[str, Any], where: Where, problems: list[Problem]) -> TrainerTable:
    """``[trainer]`` as the table of its kind, or its valid part.

    So the sets can be checked even if ``[trainer]`` is wrong; its problems are added to
    ``problems``.
    """
    only = validate(_KindOnly, table, where, problems)
    if only is None:
        return trainer_of_kind(DEFAULT_TRAINER).table()
    kind, model = only.kind, trainer_of_kind(only.kind).table
    foreign = {key: owner for key in sorted(table) if (owner := _owner(key, kind)) is not None}
    problems += [
        Problem(
            where(key),
            f"is a key of kind {owner!r}; this trainer is of kind {kind!r}",
            f'add kind = "{owner}"' if kind == DEFAULT_TRAINER else "leave it out",
        )
        for key, owner in foreign.items()
    ]
    rest = {key: value for key, value in table.items() if key not in foreign}
    right = validate(model, rest, where, problems)
    if right is None:
        sound = {key: value for key, value in rest.items() if _fits(model, key, value)}
        right = model.model_validate(sound)
    return right


def keys_of(kind: str) -> frozenset[str]:
    """All keys of ``[trainer]`` of a kind."""
    fields = trainer_of_kind(kind).table.model_fields
    return frozenset(field.alias or name for name, field in fields.items())


def _owner(key: str, kind: str) -> str | None:
    """The first kind that has a key, if the given kind does not."""
    if key in keys_of(kind):
        return None
    return next((other for other in kinds() if key in keys_of(other)), None)


def _fits(model: type[TrainerTable], key: str, value: object) -> bool:
    return validate(model, {key: value}, str, []) is not None
