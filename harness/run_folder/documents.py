"""Converge's JSON files: their schema version, and numbers that JSON does not have.

NaN and infinities are the strings ``"nan"``, ``"inf"``, ``"-inf"``; null means no value.

A schema may only gain keys: older files lack them, and the code that reads such a key says what
that means (for example ``job.recovery_of``). An incompatible change needs a new schema number, and
a function in ``UPGRADES`` that converts a file of the previous one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Schema of every file; a reader refuses newer ones."""
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: Mapping[tuple[str, int], Upgrade] = {}
"""By file name and schema, a function from the file's object to that of the next schema: of
``metrics.jsonl`` each line, of an ``.npz`` its arrays by name, and for files of steps the name is
without the step (``step.npz``). An array that only older files have stays in ``arrays.KEYS``. Files
that are not listed are the same in both."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class SchemaError(ValueError):
    """A file has a schema that this version of converge cannot read."""


def check_schema(schema: object) -> int:
    """The schema as a number. Raises SchemaError if this version of converge cannot read it."""
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise SchemaError(f"schema is {schema!r}, should be an integer from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise SchemaError(
            f"written with schema {schema} by a newer converge; this one reads up to "
            f"{SCHEMA}: upgrade converge, or use another --store"
        )
    return schema


def upgraded(name: str, value: dict[str, Any]) -> dict[str, Any]:
    """The object of a file of that name, in the current schema.

    Raises SchemaError as ``check_schema`` does.
    """
    for schema in range(check_schema(value.get("schema")), SCHEMA):
        if upgrade := UPGRADES.get((name, schema)):
            value = upgrade(value)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` that refuses repeated keys, of which json keeps the last.

    Raises ValueError when a key occurs twice.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return value


def number(value: object) -> float | None:
    """A JSON value as a number; the strings ``"nan" "inf" "-inf"`` count, null is None.

    Raises ValueError for anything else that is not a number.
    """
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def spell_not_finite(value: Any) -> Any:
    """The value with NaN and infinities replaced by the strings ``"nan" "inf" "-inf"``."""
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
    """Write a file atomically and sync it, in a rank.

    converge writes with ``converge_harness.store``, which explains disk errors to the user.
    """
    write_bytes(path, (to_json(values, indent=1) + "\n").encode())


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """The same for bytes."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(path)
