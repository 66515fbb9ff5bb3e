"""The shapes of values in JSON files, checked so that later stages can rely on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_texts(value: object) -> TypeGuard[list[str]]:
    """Whether a JSON value is a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def texts_in(value: object) -> Iterator[str]:
    """All strings in a JSON value, at any depth, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number, which may be negative."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_counts(value: object) -> TypeGuard[dict[str, int]]:
    """Whether a JSON value is an object of counts."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_names(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_texts, value.values()))


def _is_counts_seen(value: object) -> bool:
    """Whether a JSON value is an object of counts, some of which may be unknown (null)."""
    known = isinstance(value, dict) and [each for each in value.values() if each is not None]
    return isinstance(known, list) and all(map(is_count, known))


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_steps(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


Shape = tuple[Callable[[object], bool], str]
"""Tests whether a value has the shape; and the name of the shape."""
TEXT: Shape = (is_text, "a string")
TEXTS: Shape = (is_texts, "a list of strings")
COUNT: Shape = (is_count, "a count")
COUNTS: Shape = (is_counts, "a JSON object of counts")
COUNTS_LISTED: Shape = (_is_steps, "a list of counts")
COUNTS_SEEN: Shape = (_is_counts_seen, "a JSON object of counts")
NAMES: Shape = (_is_names, "a JSON object of lists of strings")
STEPS: Shape = (_is_steps, "a list of steps")
OBJECT: Shape = (_is_object, "a JSON object")
OBJECTS: Shape = (_is_objects, "a list of JSON objects")
FLAG: Shape = (_is_flag, "true or false")
NUMBER: Shape = (_is_number, "a number")
TIME: Shape = (_is_number, "a time")


def misfit(document: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    """A clause on the first key whose value does not have its shape; empty if all do.

    Keys of an inner object are dotted, and come after the object itself. A missing or null
    key fits every shape.
    """
    for key, (fits, name) in shapes.items():
        value: Any = document
        for part in key.split("."):
            value = value.get(part) if value is not None else None
        if value is not None and not fits(value):
            return f"{key} is {value!r}, which is not {name}"
    return ""
