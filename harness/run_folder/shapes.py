"""What a value of a JSON file has to be, so that later stages can rely on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard


def is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def is_texts(value: object) -> TypeGuard[list[str]]:
    """Whether a JSON value is a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_counts(value: object) -> TypeGuard[dict[str, int]]:
    """Whether a JSON value is an object of counts."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_names(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_texts, value.values()))


def _is_counts_seen(value: object) -> bool:
    """An object of counts, where null is a count that nobody could tell."""
    known = isinstance(value, dict) and [each for each in value.values() if each is not None]
    return isinstance(known, list) and all(map(is_count, known))


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_steps(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


Shape = tuple[Callable[[object], bool], str]
"""Whether a value has the shape, and what the shape is called."""
TEXT: Shape = (is_text, "text")
TEXTS: Shape = (is_texts, "list of texts")
COUNT: Shape = (is_count, "count")
COUNTS: Shape = (is_counts, "JSON object of counts")
COUNTS_SEEN: Shape = (_is_counts_seen, "JSON object of counts")
NAMES: Shape = (_is_names, "JSON object of lists of texts")
STEPS: Shape = (_is_steps, "list of steps")
OBJECT: Shape = (_is_object, "JSON object")
OBJECTS: Shape = (_is_objects, "list of JSON objects")
FLAG: Shape = (_is_flag, "true or false")
TIME: Shape = (_is_time, "time")


def misfit(document: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    """The first key whose value has not its shape, in a clause; empty where all have.

    Keys of an inner object are dotted, and come after the object itself. A key that is absent or
    null has every shape.
    """
    for key, (fits, words) in shapes.items():
        value: Any = document
        for part in key.split("."):
            value = value.get(part) if value is not None else None
        if value is not None and not fits(value):
            return f"{key} is {value!r}, which is no {words}"
    return ""
