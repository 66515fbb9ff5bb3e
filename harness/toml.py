"""TOML files as strict tables: every mistake is reported, each with its place.

::

    read_toml    a file as plain dicts, or a ConfigError that says where it breaks
    find         resolves a file's paths: beside it, one folder up, or the current folder
    Table        the pydantic base of all tables, and the kinds of value that they share
    validate     a dict as a table, or all its problems
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import tomli
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from converge_harness.errors import ConfigError, Problem, suggest

SCHEMA = 1
MAX_NAME = 80
MAX_BYTES = 4 * 1024 * 1024
"""Larger than any experiment a person writes; a wrong path (a log, a checkpoint) fails quickly."""
MAX_DEPTH = 32
"""Deepest nesting of tables and arrays, so that all other code may recurse."""
UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories refused in names: control characters, surrogates, line separators."""
UNSEEN = "Cf"
"""Also refused: characters without a width, and those that change the direction of text. With them
a name looks like another one ("Trojan Source", CVE-2021-42574).
"""

KINDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}
"""pydantic's error types to TOML's words."""
SUBJECT = re.compile(r"\A(Input|String|List|Value) should")
"""Start of pydantic's own messages."""

ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")

Where: TypeAlias = Callable[[str], str]
"""Maps a key within a table to its place in the file, for messages."""


# ----------------------------------------------------------------------- files


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, not a regular file, unreadable, too large, empty, not
        UTF-8, not TOML, or nested deeper than ``MAX_DEPTH``.
    """
    text = _read_text(path)
    if not text.strip():
        raise ConfigError(Problem(str(path), "the file is empty", "a file starts with schema = 1"))
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(Problem(str(path), f"this is not TOML: {error}")) from None
    except RecursionError:
        raise ConfigError(_too_deep(path)) from None
    except ValueError as error:  # Python refuses to convert an integer of thousands of digits
        raise ConfigError(Problem(str(path), f"a value cannot be read: {error}")) from None
    for key, value, depth in _walk(tables):
        if depth > MAX_DEPTH:
            raise ConfigError(_too_deep(path))
        if isinstance(value, datetime | date | time):
            raise ConfigError(
                Problem(f"{path}: {key}", "dates and times are not supported here", "quote it")
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
        if not path.is_file():  # reading a pipe or a device could block forever
            raise ConfigError(Problem(str(path), "this is not a regular file"))
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(
                Problem(str(path), f"the file has {size} bytes; at most {MAX_BYTES} are read")
            )
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            Problem(str(path), f"this is not UTF-8 text: {error.reason} at byte {error.start}")
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
    """Every value with its dotted key and depth. Not recursive, because it measures the depth."""
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


def expanded(written: str) -> Path:
    """The path with a leading ``~`` or ``~user`` replaced.

    Raises ValueError if there is no such user, or no home folder.
    """
    try:
        return Path(written).expanduser()
    except RuntimeError:
        user = Path(written).parts[0]
        raise ValueError(f"no home folder is known for {user!r}") from None


def find(
    written: str, folders: Sequence[Path], is_right: Callable[[Path], bool] = Path.exists
) -> Path | None:
    """The path in the first of ``folders`` that has it; None if none has.

    Args:
        written: the path as the experiment file writes it, absolute or not.
        folders: where to look for a relative path.
        is_right: test that the path has to pass, such as ``Path.is_file``.
    """
    path = expanded(written)
    return next((each for folder in folders if _is(is_right, each := folder / path)), None)


def find_file(written: str, folders: Sequence[Path]) -> Path | None:
    """The file in the first of ``folders`` that has it; None if none has."""
    return find(written, folders, Path.is_file)


def _is(is_right: Callable[[Path], bool], path: Path) -> bool:
    try:
        return is_right(path)
    except OSError:  # a name that is too long, a folder without permission
        return False


# ------------------------------------------------------------- kinds of value


def one_of(valid: Iterable[str]) -> AfterValidator:
    """A validator that accepts these words; for any other it suggests the nearest."""
    words = tuple(map(str, valid))

    def check(value: str) -> str:
        if value not in words:
            raise PydanticCustomError("choice", "is not known", {"valid": words})
        return value

    return AfterValidator(check)


def no_repetition(values: list[T]) -> list[T]:
    if len(set(values)) < len(values):
        raise PydanticCustomError("repetition", "names something twice")
    return values


def _is_readable(schema: int) -> int:
    if schema != SCHEMA:
        raise PydanticCustomError("schema", "this converge reads schema 1 only")
    return schema


def _is_path(value: str) -> str:
    try:
        expanded(value)
    except ValueError as error:
        raise PydanticCustomError("home", "{why}", {"why": str(error)}) from None
    return value


def _is_name(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("name", "is empty")
    return is_printable(value)


def is_printable(value: str) -> str:
    """Check that a text is one printable line.

    Raises pydantic's error, which becomes a problem of the file.
    """
    if any(unicodedata.category(letter) in UNPRINTABLE for letter in value):
        raise PydanticCustomError("name", "holds control characters")
    if unseen := {letter for letter in value if unicodedata.category(letter) == UNSEEN}:
        listed = ", ".join(f"U+{ord(letter):04X}" for letter in sorted(unseen))
        raise PydanticCustomError(
            "name",
            "holds {listed}, which is invisible or changes the direction of text",
            {"listed": listed},
        )
    return value


SchemaVersion = Annotated[int, AfterValidator(_is_readable)]
Name = Annotated[str, Field(max_length=MAX_NAME), AfterValidator(_is_name)]
ToolchainName = Annotated[
    str,
    Field(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._-]*)?\z", max_length=MAX_NAME
    ),
]
"""``torchtitan-0.3.0``, or ``torchtitan-0.3.0@main`` with torchtitan of that commit."""
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Words = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]], AfterValidator(no_repetition)
]
FilePath = Annotated[
    str, Field(min_length=1, max_length=4096), AfterValidator(_is_name), AfterValidator(_is_path)
]


# --------------------------------------------------------------------- tables


class Table(BaseModel):
    """Strict: ``"2"`` is not a number, ``true`` is not an integer, an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PythonTable(Table):
    """``{ python = "env/bin/python" }``: an environment of the user's own."""

    python: FilePath


def _is_table(value: object) -> str:
    return "[table]" if isinstance(value, dict | PythonTable) else "[name]"


Environment: TypeAlias = Annotated[
    Annotated[ToolchainName, Tag("[name]")] | Annotated[PythonTable, Tag("[table]")],
    Discriminator(_is_table),
]
"""A toolchain by its name, or the Python of an environment by its path."""


def validate(
    model: type[ModelT],
    table: dict[str, Any],
    where: Callable[[str], str],
    problems: list[Problem],
) -> ModelT | None:
    """Validate a table; return its model, or None with every problem added to ``problems``.

    Args:
        model: what the table should be.
        table: the table as parsed.
        where: maps a dotted key within the table to its place, for messages.
        problems: where problems are collected.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        problems += [_problem(model, dict(details), where) for details in error.errors()]
        return None


def _problem(model: type[BaseModel], error: dict[str, Any], where: Callable[[str], str]) -> Problem:
    # "[key]" of a key, and the tags of values that may be of several kinds.
    loc = tuple(part for part in error["loc"] if not str(part).startswith("["))
    place = where(_dotted(loc))
    value = error["input"]
    match error["type"]:
        case "missing":
            hint = "add schema = 1 at the top" if loc == ("schema",) else _described(model, loc)
            return Problem(place, "is missing", hint)
        case "extra_forbidden":
            return Problem(place, "unknown key", suggest(str(loc[-1]), _valid_keys(model, loc)))
        case "choice":
            return Problem(
                place, f"{show(value)} is not known", suggest(value, error["ctx"]["valid"])
            )
        case kind if kind in KINDS:
            return Problem(place, f"must be {KINDS[kind]}, not {show(value)}")
    message = SUBJECT.sub("must", error["msg"])
    # Messages of our own validators already say what is wrong with the value.
    return Problem(place, f"{message}, not {show(value)}" if "must" in message else message)


def show(value: object) -> str:
    """A value in TOML, shortened."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"


def _dotted(loc: Iterable[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _valid_keys(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Keys of the (possibly nested) table that holds the last part of ``loc``."""
    fields = _holder(model, loc).model_fields
    return [field.alias or name for name, field in fields.items()]


def _described(model: type[BaseModel], loc: tuple[str | int, ...]) -> str:
    """What to write under a key that is missing, where its field says so."""
    field = _holder(model, loc).model_fields.get(str(loc[-1]))
    return (field.description if field else None) or ""


def _holder(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel]:
    """The (possibly nested) table that holds the last part of ``loc``."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        tables = [*_tables_in(field.annotation)] if field else []
        model = tables[0] if tables else model
    return model


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _tables_in(each)
