"""Dotted keys applied to torchtitan's nested config dataclasses.

A key is a path of names and list indices: ``training.seq_len``,
``optimizer.param_groups[0].optimizer_kwargs.lr``. torchtitan's own parser only knows command-line
flags (frozen upstream, to be removed), so keys are applied to the dataclasses directly, and an
unknown key or a value of the wrong type is an error that lists the valid ones.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union

DATA_TYPE_KEYS = ("training.dtype", "training.mixed_precision_param")
"""As ``converge_harness.model.DATA_TYPE_KEYS``, which ranks cannot import."""
_PART = re.compile(r"(?P<name>[^.\[\]]+)(?P<indices>(\[\d+\])*)\Z")


@dataclass(frozen=True, slots=True)
class KeyProblem:
    """A key or value that the toolchain's config does not accept."""

    key: str
    message: str
    valid: tuple[str, ...] = ()
    """The valid keys (or values), nearest first."""


class SettingError(Exception):
    """Dotted keys are unknown, or their values are of the wrong type."""

    def __init__(self, *problems: KeyProblem) -> None:
        self.problems = problems
        super().__init__("; ".join(_sentence(problem) for problem in problems))

    @property
    def problem(self) -> KeyProblem:
        """The first problem; usually it is the only one."""
        return self.problems[0]


def _sentence(problem: KeyProblem) -> str:
    near = ", ".join(problem.valid[:8])
    place = f"{problem.key}: " if problem.key else ""
    return f"{place}{problem.message}" + (f" ({near})" if near else "")


def apply_setting(config: Any, key: str, value: Any) -> None:
    """Set one dotted key of a config object in place.

    Raises SettingError if there is no such key or the value does not fit its type.
    """
    path = _parse(key)
    target = config
    for position, step in enumerate(path[:-1]):
        target = _get(target, step, key, _join(path[:position]))
    _set(target, path[-1], value, key, _join(path[:-1]))


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key.

    Raises SettingError when the key is not there.
    """
    target = config
    path = _parse(key)
    for position, step in enumerate(path):
        target = _get(target, step, key, _join(path[:position]))
    return target


def news(config: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of the settings that the config has another value for, or that it does not have."""
    found = []
    for key, value in settings.items():
        try:
            same = value_of(config, key) == value
        except SettingError:
            same = False
        if not same:
            found.append(key)
    return tuple(found)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as (dotted key, value) pairs, in order; lists of tables get indices."""
    for name, value in table.items():
        yield from _flatten_value(f"{prefix}{name}", value)


def _flatten_value(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        yield from flatten(value, f"{key}.")
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flatten_value(f"{key}[{index}]", item)
    else:
        yield key, value


def _parse(key: str) -> list[str | int]:
    path: list[str | int] = []
    for part in key.split("."):
        match = _PART.match(part)
        if match is None:
            raise SettingError(KeyProblem(key, f"{part!r} is not a name or name[index]"))
        path.append(match["name"])
        path += [int(index) for index in re.findall(r"\d+", match["indices"])]
    return path


def _join(path: list[str | int]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _get(target: Any, step: str | int, key: str, where: str) -> Any:
    _require(target, step, key, where)
    if isinstance(step, int) or isinstance(target, dict):
        return target[step]
    return getattr(target, step)


def _set(target: Any, step: str | int, value: Any, key: str, where: str) -> None:
    if isinstance(target, dict):  # open tables such as optimizer_kwargs may get any new key
        _require_type(target.get(step), value, key)
        target[step] = value
        return
    _require(target, step, key, where)
    if isinstance(step, int):
        target[step] = value
        return
    annotation = _annotations(type(target)).get(step, Any)
    setattr(target, step, _coerce(annotation, getattr(target, step), value, key))


def _require(target: Any, step: str | int, key: str, where: str) -> None:
    place = where or "the config"
    if isinstance(step, int):
        if not isinstance(target, list):
            raise SettingError(KeyProblem(key, f"{place} is not a list"))
        if step >= len(target):
            raise SettingError(KeyProblem(key, f"{place} has {len(target)} entries"))
        return
    names = valid_names(target)
    if not names and not isinstance(target, dict):
        raise SettingError(
            KeyProblem(key, f"{place} is a single value ({target!r}), so it has no {step!r}")
        )
    if step not in names:
        raise SettingError(
            KeyProblem(
                key,
                f"{place} has no {step!r}",
                tuple(f"{where}.{name}" if where else name for name in _nearest(step, names)),
            )
        )


def valid_names(target: Any) -> list[str]:
    """The names that can follow an object in a dotted key."""
    if isinstance(target, dict):
        return [str(name) for name in target]
    if is_dataclass(target):
        return [field.name for field in fields(target) if not field.name.startswith("_")]
    return []


def _nearest(name: str, names: list[str]) -> list[str]:
    close = difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)
    return close + sorted(set(names) - set(close))


def _annotations(cls: type) -> dict[str, Any]:
    """Resolved field types; unresolvable ones (imported under TYPE_CHECKING) are not checked."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {}


def _coerce(annotation: Any, current: Any, value: Any, key: str) -> Any:
    """The value converted to the field's type: an int for a float field becomes a float."""
    if is_dataclass(current):
        raise SettingError(
            KeyProblem(key, "is a table: set one of its keys", _children(key, current))
        )
    if isinstance(current, list) and any(map(is_dataclass, current)):
        entries = (_children(f"{key}[{index}]", each) for index, each in enumerate(current))
        raise SettingError(
            KeyProblem(key, "is a list of tables: set a key of one of them", sum(entries, ()))
        )
    if annotation is Any:
        return value
    if _fits(annotation, value):
        return float(value) if _wants_float(annotation, value) else value
    allowed = _choices(annotation)
    raise SettingError(
        KeyProblem(
            key,
            f"takes {_describe(annotation)}, not {value!r}",
            tuple(allowed),
        )
    )


def _children(key: str, table: Any) -> tuple[str, ...]:
    return tuple(f"{key}.{name}" for name in valid_names(table))


def _members(annotation: Any) -> tuple[Any, ...]:
    """A union's members; anything else as its only member."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for arg in typing.get_args(annotation) for m in _members(arg))
    return (annotation,)


def _fits(annotation: Any, value: Any) -> bool:
    return any(_fits_one(member, value) for member in _members(annotation))


def _fits_one(member: Any, value: Any) -> bool:
    origin = typing.get_origin(member)
    if origin is Literal:
        return value in typing.get_args(member)
    if member in (float, int):  # a bool is an int in Python, but not in TOML
        kinds = (int, float) if member is float else int
        return isinstance(value, kinds) and not isinstance(value, bool)
    if member in (bool, str, type(None)):
        return isinstance(value, member)
    if origin is list or member is list:
        items = typing.get_args(member)
        return isinstance(value, list) and (not items or all(_fits(items[0], v) for v in value))
    return origin in (dict, tuple) or not isinstance(member, type)


def _wants_float(annotation: Any, value: Any) -> bool:
    members = _members(annotation)
    return type(value) is int and float in members and int not in members


def _choices(annotation: Any) -> list[str]:
    return [
        repr(choice)
        for member in _members(annotation)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    ]


def _describe(annotation: Any) -> str:
    names = []
    for member in _members(annotation):
        if typing.get_origin(member) is Literal:
            names.append("one of " + ", ".join(repr(c) for c in typing.get_args(member)))
        elif member is type(None):
            names.append("nothing")
        else:
            names.append(getattr(member, "__name__", str(member)))
    return " or ".join(names)


def _require_type(current: Any, value: Any, key: str) -> None:
    """In an open table a value must have the kind (number, string …) of the one it replaces."""
    if current is None or value is None:
        return
    number = (int, float)
    same = (
        isinstance(value, number) and not isinstance(value, bool)
        if isinstance(current, number) and not isinstance(current, bool)
        else isinstance(value, list | tuple)
        if isinstance(current, list | tuple)
        else isinstance(value, type(current))
    )
    if not same:
        raise SettingError(KeyProblem(key, f"takes {type(current).__name__}, not {value!r}"))
