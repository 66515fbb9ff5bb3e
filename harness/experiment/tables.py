"""The tables of an experiment file and of a train config's ``[converge]``, as pydantic models.

A model says what one table may hold by itself. What needs several tables (a test's control, unique
names) or files is checked in ``load.py``; what needs batch sizes and toolchains in
``harness/plan/rules``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from harness.errors import Problem, suggest
from harness.experiment.paths import expanded
from harness.experiment.words import cadence_of, repeat_of
from harness.model import (
    DEFAULT_REPEATS,
    FROZEN_STEPS,
    POWERS_OF_TWO,
    Across,
    Ask,
    Cadence,
    Kind,
    Launcher,
    Repeat,
    Technique,
)

SCHEMA = 1
MAX_NAME = 80
LARGEST_SEED = 2**32 - 1
MOST_FROZEN = 1024
PIPELINE_SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""The concrete schedules of ``torch.distributed.pipelining.schedules.get_schedule_class``."""
CP_ROTATIONS = ("allgather", "alltoall")
SPMD_BACKENDS = ("spmd_types", "partial_dtensor", "full_dtensor")
SIGNALS = ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed")
UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories kept out of names: control characters, surrogates, line separators."""
UNSEEN = "Cf"
"""Kept out, too: characters without a width, and those that turn the direction of text. With them a
name reads as another ("Trojan Source", CVE-2021-42574)."""

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
"""How pydantic's own messages start."""

ModelT = TypeVar("ModelT", bound=BaseModel)
T = TypeVar("T")


# ------------------------------------------------------------- kinds of value


def one_of(valid: Iterable[str]) -> AfterValidator:
    """A validator that lets these words through; for any other the nearest is suggested."""
    words = tuple(map(str, valid))

    def check(value: str) -> str:
        if value not in words:
            raise PydanticCustomError("choice", "is not known", {"valid": words})
        return value

    return AfterValidator(check)


def _no_repetition(values: list[T]) -> list[T]:
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
    """A text of one line.

    Raises pydantic's error, which becomes a problem of the file.
    """
    if any(unicodedata.category(letter) in UNPRINTABLE for letter in value):
        raise PydanticCustomError("name", "holds control characters")
    if unseen := {letter for letter in value if unicodedata.category(letter) == UNSEEN}:
        listed = ", ".join(f"U+{ord(letter):04X}" for letter in sorted(unseen))
        raise PydanticCustomError(
            "name", "holds {listed}, which nobody sees and which may turn text", {"listed": listed}
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
Degree = Annotated[int, Field(ge=1, le=65_536)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Margin = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
"""Relative: 1 and more is a percentage by mistake, and would let everything pass."""
Repeats = Annotated[
    list[Annotated[Repeat, PlainValidator(repeat_of)]], AfterValidator(_no_repetition)
]
Schedule = Annotated[str, one_of(PIPELINE_SCHEDULES)]
Rotation = Annotated[str, one_of(CP_ROTATIONS)]
SpmdBackend = Annotated[str, one_of(SPMD_BACKENDS)]
Techniques = Annotated[list[Annotated[str, one_of(Technique)]], AfterValidator(_no_repetition)]
KindWord = Annotated[str, one_of(Kind)]
AskWord = Annotated[str, one_of(Ask)]
Words = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]], AfterValidator(_no_repetition)
]
FilePath = Annotated[
    str, Field(min_length=1, max_length=4096), AfterValidator(_is_name), AfterValidator(_is_path)
]


# --------------------------------------------------------------------- tables


class Table(BaseModel):
    """Strict: ``"2"`` is no number, ``true`` is no integer, an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ParallelismTable(Table):
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1
    cp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1


class FixedTable(Table):
    """What a control, a test and all sets of a matrix can say in one value."""

    overrides: dict[str, Any] = Field(default={}, alias="set")
    tolerance: dict[Annotated[str, one_of(SIGNALS)], Tolerance] = {}
    margin: Margin | None = None
    waive: Words = []
    toolchain: ToolchainName | None = None
    train_config: FilePath | None = None
    inject: FilePath | None = None
    without_fixes: Words = []
    note: Annotated[str, Field(max_length=2000)] = ""


class SetTable(FixedTable):
    """What a control and a test have in common."""

    parallelism: ParallelismTable
    techniques: Techniques = []
    pipeline_schedule: Schedule | None = None
    cp_rotation: Rotation | None = None
    spmd_backend: SpmdBackend | None = None


class ControlTable(SetTable):
    name: Name = "control"


class AnchorTable(SetTable):
    name: Name = "anchor"


class TestTable(SetTable):
    """A test set with degrees of its own; other kinds are in ``harness/experiment/kinds.py``."""

    name: Name
    kind: KindWord = Kind.PARALLEL
    control: Name | None = None
    ask: AskWord = Ask.SAME
    own_random_numbers: bool = False

    __test__ = False  # pytest: this is no test class


class ProbeTable(Table):
    cadence: Annotated[Cadence, PlainValidator(cadence_of)] = POWERS_OF_TWO
    frozen: Annotated[int, Field(ge=0, le=MOST_FROZEN)] = FROZEN_STEPS


class FileTable(Table):
    """The top of the file.

    The tables in it are validated one by one, so that one broken table does not hide the problems
    of another.
    """

    schema_version: SchemaVersion = Field(alias="schema")
    name: Name | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 42
    seeds: dict[str, Any] | None = None
    repeats: Repeats = list(DEFAULT_REPEATS)
    calibration: FilePath | None = None
    reference: bool = True
    baseline: FilePath | None = None
    baseline_across: Annotated[
        list[Annotated[str, one_of(Across)]], AfterValidator(_no_repetition)
    ] = []
    launcher: Annotated[str, one_of(Launcher)] = Launcher.LOCAL
    cluster: dict[str, Any] = {}
    probe: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    anchor: dict[str, Any] | None = None
    control: dict[str, Any]
    controls: dict[str, dict[str, Any]] = {}
    test: list[dict[str, Any]] = []
    matrix: dict[str, Any] | None = None


# ----------------------------------------------------------------- validation


def validate(
    model: type[ModelT],
    table: dict[str, Any],
    where: Callable[[str], str],
    problems: list[Problem],
) -> ModelT | None:
    """The table as its model; or None, with every problem added to ``problems``.

    Args:
        model: what the table should be.
        table: the table as TOML gave it.
        where: from a dotted key within the table to its place, for messages.
        problems: where problems are collected.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        problems += [_problem(model, dict(details), where) for details in error.errors()]
        return None


def _problem(model: type[BaseModel], error: dict[str, Any], where: Callable[[str], str]) -> Problem:
    loc = tuple(part for part in error["loc"] if part != "[key]")
    place = where(_dotted(loc))
    value = error["input"]
    match error["type"]:
        case "missing":
            hint = "add schema = 1 at the top" if loc == ("schema",) else ""
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
    # Messages of our own validators say by themselves what is wrong with the value.
    return Problem(place, f"{message}, not {show(value)}" if "must" in message else message)


def show(value: object) -> str:
    """A value as TOML writes it, shortened."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME - 1]}…"


def _dotted(loc: Iterable[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _valid_keys(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Keys of the (possibly nested) table that holds the last part of ``loc``."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        model = tables[0] if tables else model
    return [field.alias or name for name, field in model.model_fields.items()]
