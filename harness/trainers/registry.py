"""Finds a trainer by its kind; its package is loaded when it is asked for.

A kind is ours, registered by the program that runs, or declared by an installed distribution as an
entry point of the group ``converge.trainers``: ``tiny = "my_package.tiny"``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import SetSpec
from converge_harness.toml import Table, Where, validate
from converge_harness.trainers.base import Trainer
from converge_harness.trainers.table import DEFAULT_TRAINER, TrainerTable

_MODULES = {
    "torchtitan": "converge_harness.trainers.torchtitan",
    "command": "converge_harness.trainers.command",
    "megatron": "converge_harness.trainers.megatron",
}
"""Kind to the module that has its ``TRAINER``."""

_GROUP = "converge.trainers"


@cache
def _installed() -> Mapping[str, str]:
    """Kinds that installed distributions declare. Reads their metadata, once, in about 50 ms.

    Raises ConfigError for two that declare one kind.
    """
    found: dict[str, str] = {}
    for each in entry_points(group=_GROUP):
        if found.setdefault(each.name, each.value) != each.value:
            raise ConfigError(
                Problem(
                    f"trainer {each.name!r}",
                    f"two installed distributions declare it: {found[each.name]}, {each.value}",
                    "uninstall one of them",
                )
            )
    return found


def _module_of(kind: str) -> str | None:
    """The module of a kind; ours and registered ones take precedence over installed ones."""
    return _MODULES.get(kind) or _installed().get(kind)


def register(kind: str, module: str) -> None:
    """Register the ``TRAINER`` of a module as ``[trainer] kind``.

    Raises ValueError if the kind is already taken by another module.
    """
    if _MODULES.setdefault(kind, module) != module:
        raise ValueError(f"trainer {kind!r} is already {_MODULES[kind]}")


def kinds() -> tuple[str, ...]:
    """All that ``[trainer] kind`` can be: registered, in that order, then installed."""
    return tuple({**_MODULES, **_installed()})


@cache
def trainer_of_kind(kind: str) -> Trainer:
    """The trainer; raises KeyError for a kind that nobody has registered or installed."""
    module = _module_of(kind)
    if module is None:
        raise KeyError(kind)
    found: Trainer = importlib.import_module(module).TRAINER
    return found


def trainer_of(spec: SetSpec) -> Trainer:
    """The trainer of a set."""
    return trainer_of_kind(spec.trainer.kind)


def trainer_of_document(job: Mapping[str, Any]) -> Trainer:
    """The trainer of a ``job.json``, which names it unless it is torchtitan or command.

    Raises KeyError for one that nobody has registered.
    """
    unnamed = DEFAULT_TRAINER if job.get("command") is None else "command"
    return trainer_of_kind(job.get("trainer", unnamed))


# --------------------------------------------------------------- [trainer] of a file


def _is_registered(kind: str) -> str:
    if _module_of(kind) is None:
        raise PydanticCustomError("choice", "is not known", {"valid": kinds()})
    return kind


class _KindOnly(Table):
    model_config = ConfigDict(extra="ignore")

    kind: Annotated[str, AfterValidator(_is_registered)] = DEFAULT_TRAINER


def read_trainer(table: dict[str, Any], where: Where, problems: list[Problem]) -> TrainerTable:
    """``[trainer]`` as the table of its kind; invalid keys are left out.

    So the sets can be checked all the same; problems are added to ``problems``.
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
    """All keys that ``[trainer]`` of a kind may hold."""
    fields = trainer_of_kind(kind).table.model_fields
    return frozenset(field.alias or name for name, field in fields.items())


def _owner(key: str, kind: str) -> str | None:
    """The first registered kind that has a key that the kind itself lacks."""
    if key in keys_of(kind):
        return None
    return next((other for other in _MODULES if key in keys_of(other)), None)


def _fits(model: type[TrainerTable], key: str, value: object) -> bool:
    return validate(model, {key: value}, str, []) is not None
