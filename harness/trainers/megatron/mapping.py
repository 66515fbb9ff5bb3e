"""Reads the file by which Megatron-Core starts from the checkpoint of another trainer's model.

::

    rotary_interleaved = true       # the other model rotates neighbouring rows: 0 with 1
    beside = ["optimizer.*"]        # tensors of the checkpoint that are no weights
    [parameters]                    # Megatron-Core's name = the name in the checkpoint
    "layers.*.self_attention.linear_q.weight" = "layers.*.attention.qkv_linear.wq.weight"
    [modules]                       # those that compute the same, to be compared
    "layers.*.mlp" = "layers.*.feed_forward"

``*`` is the number of a layer. Whether the mapping is complete only the ranks can know, which have
the model and the checkpoint (``rank/megatron/seed_checkpoint.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from converge_harness.errors import ConfigError, Problem
from converge_harness.run_folder.weight_mapping import ANY_LAYER, WeightMapping
from converge_harness.toml import Table, Where, Words, find_file, read_toml, validate

_Names = dict[str, Annotated[str, Field(min_length=1)]]


class MappingTable(Table):
    """The whole file."""

    rotary_interleaved: bool
    beside: Words = Field(default=[])
    parameters: Annotated[_Names, Field(min_length=1)]
    modules: _Names = Field(default={})


def read_mapping(
    written: str, folders: Sequence[Path], where: Where, problems: list[Problem]
) -> WeightMapping | None:
    """The mapping in a file; None if it is not there or invalid, which is added to ``problems``.

    Args:
        written: the path as the experiment file has it.
        folders: where a relative path is resolved; the first match wins.
        where: maps a key of ``[trainer]`` to its place.
        problems: where problems are collected.
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
    table = validate(MappingTable, tables, lambda key: f"{path}: {key}", problems)
    if table is None:
        return None
    found = [
        *_name_problems(table.parameters, f"{path}: parameters"),
        *_name_problems(table.modules, f"{path}: modules"),
    ]
    problems += found
    if found:
        return None
    return WeightMapping(
        table.parameters, table.modules, tuple(table.beside), table.rotary_interleaved
    )


def _name_problems(names: Mapping[str, str], place: str) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for name, other in names.items():
        stars = name.count(ANY_LAYER), other.count(ANY_LAYER)
        if stars[0] != stars[1] or stars[0] > 1:
            yield Problem(
                f"{place}.{name!r}",
                f"is {other!r}: both names have one {ANY_LAYER}, for the number of the layer, or "
                "none has",
            )
        if other in taken:
            yield Problem(
                f"{place}.{name!r}",
                f"is {other!r}, and so is {taken[other]!r}",
                "each has its own name in the checkpoint",
            )
        taken[other] = name
