"""``[matrix]``: test sets as a product of lists.

Axes are lists of values: every ``parallelism`` degree, ``techniques`` (a list of lists),
``pipeline_schedule``, ``cp_rotation``, ``spmd_backend`` and every key of ``set``. All other keys
mean the same as in a ``[[test]]`` and apply to all sets::

    [matrix]
    name = "tp{tp}_pp{pp}_{techniques}"     # optional
    parallelism = { dp_shard = [2], tp = [1, 2], pp = [1, 2] }
    techniques = [[], ["compile"]]
    pipeline_schedule = ["1F1B", "Interleaved1F1B"]

With ``pp = 1`` there is no schedule to vary, and with ``cp = 1`` no rotation, so combinations that
differ only in these are one set.

The placeholders of a name are the degrees (``{dp_replicate} {dp_shard} {tp} {cp} {pp} {ep}``),
``{techniques}`` (joined by ``+``, ``plain`` if there are none), ``{schedule}``, ``{rotation}`` and
the last part of a ``set`` key (``{seq_len}``). Without a template a name lists what is not at its
default, as in ``fsdp2_tp2_pp2_interleaved1f1b_compile``, and then every ``set`` key that varies.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Annotated, Any

from pydantic import Field

from converge_harness.errors import Problem
from converge_harness.experiment.tables import (
    AskWord,
    Degree,
    FixedTable,
    Rotation,
    Schedule,
    SpmdBackend,
    Techniques,
    TestTable,
)
from converge_harness.model import Ask
from converge_harness.toml import Name, Table, flatten, validate

MAX_SETS = 1000
"""More sets than this are a mistake, not an experiment."""

Degrees = Annotated[list[Degree], Field(min_length=1)]


class ParallelismAxes(Table):
    dp_replicate: Degrees = Field(default=[1])
    dp_shard: Degrees = Field(default=[1])
    tp: Degrees = Field(default=[1])
    cp: Degrees = Field(default=[1])
    pp: Degrees = Field(default=[1])
    ep: Degrees = Field(default=[1])


class MatrixTable(FixedTable):
    """``[matrix]``: lists instead of the values of a ``[[test]]``."""

    name: str | None = None
    control: Name | None = None
    ask: AskWord = Ask.SAME
    parallelism: ParallelismAxes
    techniques: Annotated[list[Techniques], Field(min_length=1)] = Field(default=[[]])
    pipeline_schedule: Annotated[list[Schedule], Field(min_length=1)] | None = None
    cp_rotation: Annotated[list[Rotation], Field(min_length=1)] | None = None
    spmd_backend: Annotated[list[SpmdBackend], Field(min_length=1)] | None = None


def expand(
    table: dict[str, Any], where: Callable[[str], str], problems: list[Problem]
) -> tuple[TestTable, ...]:
    """The test sets of a ``[matrix]`` table; problems are added to ``problems``."""
    matrix = validate(MatrixTable, table, where, problems)
    if matrix is None:
        return ()
    axes = _axes(matrix)
    found = [
        Problem(where(key), "must be a list of values, one per set")
        for key, values in axes.items()
        if not isinstance(values, list) or not values
    ]
    if not found and (size := prod(len(values) for values in axes.values())) > MAX_SETS:
        found.append(Problem(where("parallelism"), f"{size} combinations; at most {MAX_SETS}"))
    problems += found
    if found:
        return ()
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return _named(matrix, _distinct(combinations), where, problems)


def _axes(matrix: MatrixTable) -> dict[str, Any]:
    """Dotted key to its list of values, slowest first."""
    return {
        **{f"parallelism.{name}": degrees for name, degrees in matrix.parallelism},
        "pipeline_schedule": matrix.pipeline_schedule or [None],
        "cp_rotation": matrix.cp_rotation or [None],
        "spmd_backend": matrix.spmd_backend or [None],
        "techniques": matrix.techniques,
        **{f"set.{key}": values for key, values in flatten(matrix.overrides)},
    }


def _distinct(combinations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    distinct: list[dict[str, Any]] = []
    seen: set[str] = set()
    for combination in combinations:
        if combination["parallelism.pp"] == 1:
            combination["pipeline_schedule"] = None
        if combination["parallelism.cp"] == 1:
            combination["cp_rotation"] = None
        if repr(combination) not in seen:
            seen.add(repr(combination))
            distinct.append(combination)
    return distinct


def _named(
    matrix: MatrixTable,
    combinations: list[dict[str, Any]],
    where: Callable[[str], str],
    problems: list[Problem],
) -> tuple[TestTable, ...]:
    varying = [
        key for key in combinations[0] if len({repr(each[key]) for each in combinations}) > 1
    ]
    sets: dict[str, TestTable] = {}
    for combination in combinations:
        try:
            name = "".join(_name(matrix.name, combination, varying))
        except ValueError as error:
            hint = f"there are: {', '.join(_fields(combination))}"
            problems.append(Problem(where("name"), str(error), hint))
            return ()
        test = validate(TestTable, _test(matrix, combination, name), where, problems)
        if test is None:
            return ()
        if name in sets:
            hint = f"what varies: {', '.join(key.rsplit('.', 1)[-1] for key in varying)}"
            problems.append(
                Problem(where("name"), f"two combinations are both named {name!r}", hint)
            )
            return ()
        sets[name] = test
    return tuple(sets.values())


def _test(matrix: MatrixTable, combination: dict[str, Any], name: str) -> dict[str, Any]:
    """One combination as a ``[[test]]`` table."""
    test = matrix.model_dump(exclude={"parallelism", "overrides"}) | {"parallelism": {}, "set": {}}
    for key, value in combination.items():
        table, _, inner = key.partition(".")
        if inner:
            test[table][inner] = value
        else:
            test[key] = value
    return test | {"name": name}


def _fields(combination: dict[str, Any]) -> dict[str, str]:
    fields = {key.rsplit(".", 1)[-1]: str(value) for key, value in combination.items()}
    return fields | {
        "techniques": "+".join(combination["techniques"]) or "plain",
        "schedule": combination["pipeline_schedule"] or "none",
        "rotation": combination["cp_rotation"] or "none",
        "spmd_backend": combination["spmd_backend"] or "default",
    }


def _name(template: str | None, combination: dict[str, Any], varying: list[str]) -> Iterator[str]:
    """``str.format`` without its attribute access and format specifications.

    Raises:
        ValueError: the template has an unknown placeholder, or its braces do not match.
    """
    if template is None:
        yield "_".join(_parts(combination, varying))
        return
    fields = _fields(combination)
    for literal, wanted, specification, conversion in string.Formatter().parse(template):
        yield literal
        if wanted is None:
            continue
        if wanted not in fields or specification or conversion:
            raise ValueError(f"{{{wanted}}} is not a placeholder of names")
        yield fields[wanted]


def _parts(combination: dict[str, Any], varying: list[str]) -> Iterator[str]:
    """The parts of the default name, safe for a folder."""
    degree = {key.removeprefix("parallelism."): value for key, value in combination.items()}
    replicate, shard = degree["dp_replicate"], degree["dp_shard"]
    if replicate > 1:
        yield f"hsdp{replicate}x{shard}" if shard > 1 else f"ddp{replicate}"
    else:
        yield f"fsdp{shard}"
    yield from (f"{axis}{degree[axis]}" for axis in ("tp", "cp", "pp", "ep") if degree[axis] > 1)
    words = (degree[key] for key in ("pipeline_schedule", "cp_rotation", "spmd_backend"))
    yield from (_slug(word) for word in words if word)
    yield from combination["techniques"]
    for key, value in combination.items():
        if key.startswith("set.") and key in varying:
            yield _slug(f"{key.rsplit('.', 1)[-1]}{value}")


def _slug(value: object) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-").lower()
