"""A TOML file as plain dicts, or a ConfigError that says where it breaks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import tomli

from harness.errors import ConfigError, Problem

MAX_BYTES = 4 * 1024 * 1024
"""Larger than any experiment a person writes; keeps a mistaken path (a log, a checkpoint) cheap."""
MAX_DEPTH = 32
"""Deepest table or array nesting: everything downstream may then recurse."""


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, no regular file, unreadable, too large, empty, not UTF-8,
            no TOML, or nested deeper than ``MAX_DEPTH``.
    """
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(Problem(str(path), "the file is empty", "a file starts with schema = 1"))
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(Problem(str(path), f"this is no TOML: {error}")) from None
    except RecursionError:
        raise ConfigError(_too_deep(path)) from None
    except ValueError as error:  # Python refuses to convert an integer of thousands of digits
        raise ConfigError(Problem(str(path), f"a value cannot be read: {error}")) from None
    for key, value, depth in _walk(tables):
        if depth > MAX_DEPTH:
            raise ConfigError(_too_deep(path))
        if isinstance(value, datetime | date | time):
            raise ConfigError(
                Problem(f"{path}: {key}", "dates and times have no place here", "quote it")
            )
    return tables


def flatten(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; dotted keys, sub-tables and quoted keys may be mixed."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            for below, leaf in flatten(value):
                yield f"{key}.{below}", leaf
        else:
            yield key, value


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(Problem(str(path), "this is a folder, not a file"))
        if not path.exists():
            raise ConfigError(Problem(str(path), "there is no such file", _neighbours(path)))
        if not path.is_file():  # reading a pipe or a device may never end
            raise ConfigError(Problem(str(path), "this is no regular file"))
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                Problem(str(path), f"the file has {size} bytes; at most {MAX_BYTES} are read")
            )
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            Problem(str(path), f"this is no UTF-8 text: {error.reason} at byte {error.start}")
        ) from None
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error.strerror}")) from None


def _neighbours(path: Path) -> str:
    """The TOML files beside it, and those of a folder ``experiments`` there."""
    return "; ".join(
        f"in {folder} there are: {', '.join(names)}"
        for folder in (path.parent, path.parent / "experiments")
        if (names := sorted(other.name for other in folder.glob("*.toml")))
    )


def _too_deep(path: Path) -> Problem:
    return Problem(str(path), f"tables and arrays are nested more than {MAX_DEPTH} deep")


def _walk(tables: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Every value with its dotted key and depth. Iterative: depth is what it is there to find."""
    stack: list[tuple[str, Any, int]] = [("", tables, 0)]
    while stack:
        key, value, depth = stack.pop()
        yield key.lstrip("."), value, depth
        if depth > MAX_DEPTH:
            continue
        if isinstance(value, dict):
            stack += [(f"{key}.{name}", below, depth + 1) for name, below in value.items()]
        elif isinstance(value, list):
            stack += [(f"{key}[{i}]", below, depth + 1) for i, below in enumerate(value)]
