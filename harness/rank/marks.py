"""Marks of a config, a model or a trainer: those before a call and after it differ if it changed.

Cheap: no tensor is read, only counted how often it was written to. What is not reachable from the
object is not seen: a function of another module that is replaced, say.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch

Marks: TypeAlias = dict[Any, Any]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), enum.Enum, torch.dtype, torch.device)
_NOT_LOOKED_INTO = (torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType)
_OF_THE_MACHINERY = ("logging", "threading", "_thread", "concurrent", "asyncio", "weakref", "queue")
"""What objects of these packages hold changes by being used."""
_MOST = 500_000
"""Objects that are looked at: a model of 100 layers has about 50,000."""


class _Kept(dict[Any, Any]):
    """Marks by id; keeps what it has seen alive, so that no id is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Any] = []


def object_marks(root: Any) -> Marks:
    """Marks of everything that is reachable from an object's attributes."""
    marks, left = _Kept(), [root]
    seen: set[int] = set()
    while left and len(seen) < _MOST:
        each = left.pop()
        if id(each) in seen or isinstance(each, _PLAIN):
            continue
        seen.add(id(each))
        marks.alive.append(each)
        parts = dict(_parts(each))
        marks[id(each)] = (_class_mark(type(each), marks), _own_mark(each), _refer(parts))
        left += parts.values()
    return marks


def changed_modules(root: Any, before: Marks, after: Marks) -> set[str]:
    """Classes of the modules below an object whose own marks differ, or their class's.

    A module that only holds a changed one is not changed itself.
    """
    found = set()
    for module in root.modules() if isinstance(root, torch.nn.Module) else ():
        own = (id(module), type(module), *(id(vars(module).get(key)) for key in _HELD))
        if any(before.get(key) != after.get(key) for key in own):
            found.add(type(module).__name__)
    return found


_HELD = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")


def config_marks(config: Any) -> Marks:
    """Marks of a tree of dataclasses by its keys: a copy of it has the same."""
    return dict(_walk("", config))


def _walk(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield key, type(value)
        for field in dataclasses.fields(value):
            yield from _walk(f"{key}.{field.name}", getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        yield key, tuple(map(repr, value))
        for name, inner in value.items():
            yield from _walk(f"{key}.{name}", inner)
    elif isinstance(value, list | tuple):
        yield key, len(value)
        for index, inner in enumerate(value):
            yield from _walk(f"{key}[{index}]", inner)
    elif isinstance(value, partial):
        yield from _walk(f"{key}()", (value.func, value.args, value.keywords))
    else:
        yield key, repr(value) if isinstance(value, _PLAIN) else _Same(value)


class _Same:
    """Equal to marks of the same object only; keeps it alive."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """What an object holds, by attribute, key or index."""
    if isinstance(value, MethodType):
        yield "function", value.__func__
        yield "self", value.__self__
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield (repr(key) if isinstance(key, _PLAIN) else id(key)), inner
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, partial):
        yield from enumerate((value.func, value.args, value.keywords))
    if not _is_whole(value):
        yield from getattr(value, "__dict__", {}).items()
        yield from _slots(value)


def _is_whole(value: Any) -> bool:
    """Whether what is inside of a value says nothing."""
    machinery = type(value).__module__.partition(".")[0] in _OF_THE_MACHINERY
    return machinery or isinstance(value, _NOT_LOOKED_INTO)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _refer(parts: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(
        (key, repr(value) if isinstance(value, _PLAIN) else id(value))
        for key, value in parts.items()
    )


def _own_mark(value: Any) -> Any:
    """Of a tensor, how often it was written to."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value._version, value.requires_grad
    except RuntimeError:  # made in inference mode
        return None


def _class_mark(kind: type, marks: _Kept) -> int:
    """A class and what its own and its bases' attributes are: methods may be replaced there."""
    if kind not in marks:
        # Attributes that a class gets by being used are left out.
        attributes = [
            (base, name, value)
            for base in kind.__mro__
            if base.__module__ != "builtins"
            for name, value in list(vars(base).items())
            if callable(value) or isinstance(value, property | classmethod | staticmethod)
        ]
        marks.alive += attributes
        marks[kind] = tuple((id(base), name, id(value)) for base, name, value in attributes)
    return id(kind)
