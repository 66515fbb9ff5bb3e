"""Reads the file by which a trainer starts from the checkpoint of another trainer's model.

::

    rotary_interleaved = true       # the other model rotates neighbouring rows: 0 with 1
    beside = ["optimizer.*"]        # tensors of the checkpoint that are no weights
    [parameters]                    # the name in the model that trains = that in the checkpoint
    "model.layers.*.self_attn.q_proj.weight" = "layers.*.attention.qkv_linear.wq.weight"
    [modules]                       # those that compute the same, to be compared
    "model.layers.*.mlp" = "layers.*.feed_forward"
    [half_split]                    # of a program: parameters that it rotates half-split, and rows
    "model.layers.*.self_attn.q_proj.weight" = 16   # of a head

``*`` is the number of a layer. What a trainer knows of its own model it checks itself
(``NameProblems``). Whether the mapping is complete only the ranks can know, which have the model
and the checkpoint (``rank/seed_checkpoint.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.run_folder.weight_mapping import ANY_LAYER, WeightMapping
from converge_harness.toml import Table, Where, Words, find_file, read_toml, validate

_Names = dict[str, Annotated[str, Field(min_length=1)]]


class MappingTable(Table):
    """The whole file."""

    rotary_interleaved: bool
    beside: Words = Field(default=[])
    parameters: Annotated[_Names, Field(min_length=1)]
    modules: _Names = Field(default={})
    half_split: dict[str, Annotated[int, Field(ge=2, multiple_of=2)]] = Field(default={})


NameProblems: TypeAlias = Callable[[MappingTable, Where], Iterable[Problem]]
"""What a trainer knows to be wrong with the names of its own model; the second argument maps a key
of the file to its place."""


def read_mapping(
    written: str,
    folders: Sequence[Path],
    where: Where,
    problems: list[Problem],
    of_trainer: NameProblems,
) -> WeightMapping | None:
    """The mapping in a file; None if it is not there or invalid, which is added to ``problems``.

    Args:
        written: the path as the experiment file has it.
        folders: where a relative path is resolved; the first match wins.
        where: maps a key of ``[trainer]`` to its place.
        problems: where problems are collected.
        of_trainer: finds further problems. A name that it reports is not checked here.
    """
    path = find_file(written, folders)
    if path is None:
        looked = ", ".join(map(str, folders))
        problems.append(
            Problem(where("weights"), f"there is no file {written!r}", f"looked in: {looked}")
        )
        return None
    try:
        tables = read_toml(path)
    except ConfigError as error:
        problems += error.problems
        return None
    place = _places(path)
    table = validate(MappingTable, tables, place, problems)
    if table is None:
        return None
    found = list(of_trainer(table, place))
    known = {each.where for each in found}
    found += [
        each
        for key in ("parameters", "modules")
        for each in _name_problems(getattr(table, key), _below(place, key))
        if each.where not in known
    ]
    problems += found
    if found:
        return None
    return WeightMapping(
        table.parameters,
        table.modules,
        tuple(table.beside),
        table.rotary_interleaved,
        table.half_split,
    )


def of_program(table: MappingTable, place: Where) -> Iterator[Problem]:
    """What is wrong with the names of a user's program, of whose model nothing is known."""
    for name in table.half_split:
        if name not in table.parameters:
            yield Problem(
                place(f"half_split.{name}"),
                "is no name in [parameters]",
                suggest(name, sorted(table.parameters)),
            )


def _below(place: Where, table: str) -> Where:
    return lambda name: place(f"{table}.{name}")


def _places(path: Path) -> Where:
    """Maps a key of the file to its place: the file, the line if it is found, and the key."""
    lines = path.read_text().splitlines()

    def place(dotted: str) -> str:
        table, _, name = dotted.partition(".")
        key = re.compile(rf"""\s*["']?{re.escape(name or table)}["']?\s*=""")
        inside = ""
        for number, line in enumerate(lines, 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                inside = header[1].strip()
            elif key.match(line) and inside == (table if name else ""):
                return f"{path}:{number}: {dotted}"
        return f"{path}: {dotted}"

    return place


def _name_problems(names: Mapping[str, str], place: Where) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for name, other in names.items():
        stars = name.count(ANY_LAYER), other.count(ANY_LAYER)
        if stars[0] != stars[1] or stars[0] > 1:
            yield Problem(
                place(name),
                f"is {other!r}: both names need one {ANY_LAYER}, for the number of the layer, or "
                "neither may have it",
            )
        if other in taken:
            yield Problem(
                place(name),
                f"is {other!r}, and so is {taken[other]!r}",
                "each has its own name in the checkpoint",
            )
        taken[other] = name
