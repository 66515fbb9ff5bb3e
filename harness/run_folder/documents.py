"""JSON files of ours: their schema version, and numbers that JSON cannot write.

NaN and infinities are the strings ``"nan"``, ``"inf"``, ``"-inf"``; null means that there is no
value.

A schema grows by keys alone: older files do not have them, and what that means is said where the
key is read (``job.recovery_of``, say). A change that older files contradict takes the next number,
and a function in ``UPGRADES`` that brings a file of the number before it up to it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Of every file; a reader refuses newer ones."""
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: Mapping[tuple[str, int], Upgrade] = {}
"""By a file's name and its schema: the file's object to that of the next schema. Files that are not
named here are the same in both."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class SchemaError(ValueError):
    """A file has a schema that this version of converge does not read."""


def check_schema(schema: object) -> int:
    """The number. Raises SchemaError unless this version of converge reads files of that schema."""
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise SchemaError(f"schema is {schema!r}, should be an integer from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise SchemaError(
            f"written with schema {schema} by a newer converge; this one reads up to "
            f"{SCHEMA}: upgrade converge, or use another --store"
        )
    return schema


def upgraded(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """The object of a file of that name as today's schema has it.

    Raises SchemaError as ``check_schema``.
    """
    for schema in range(check_schema(value.get("schema")), SCHEMA):
        if upgrade := UPGRADES.get((name, schema)):
            value = upgrade(value)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as ``object_pairs_hook``; json itself would silently keep the last of two.

    Raises ValueError when a key is in it twice.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return value


def number(value: object) -> float | None:
    """A JSON value as a number: ``"nan" "inf" "-inf"`` are those, null is None.

    Raises ValueError for anything else that is no number.
    """
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{value!r} is no number")


def spell_not_finite(value: Any) -> Any:
    """A value with the words ``"nan" "inf" "-inf"`` for the numbers that JSON has none for."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: spell_not_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [spell_not_finite(entry) for entry in value]
    return value


def to_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON in which non-finite numbers are strings."""
    return json.dumps(spell_not_finite(values), allow_nan=False, indent=indent)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a whole file atomically, from a rank; on disk for sure.

    The harness, which explains to a person what a disk refuses, writes by
    ``converge_harness.store``.
    """
    write_bytes(path, (to_json(values, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """The same for any content."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)
