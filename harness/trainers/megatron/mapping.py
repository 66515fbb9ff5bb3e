"""Reads the file by which Megatron-Core starts from the checkpoint of another trainer's model.

::

    rotary_interleaved = true       # the other model rotates neighbouring rows: 0 with 1
    beside = ["optimizer.*"]        # tensors of the checkpoint that are no weights
    [parameters]                    # Megatron-Core's name = the name in the checkpoint
    "layers.*.self_attention.linear_q.weight" = "layers.*.attention.qkv_linear.wq.weight"
    [modules]                       # those that compute the same, to be compared
    "layers.*.mlp" = "layers.*.feed_forward"

``*`` is the number of a layer. Names on the left are checked here, by those of the layers that
converge builds (``PARAMETERS``). Whether the mapping is complete only the ranks can know, which
have the model and the checkpoint (``rank/megatron/seed_checkpoint.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from converge_harness.errors import ConfigError, Problem, suggest
from converge_harness.run_folder.weight_mapping import ANY_LAYER, WeightMapping
from converge_harness.toml import Table, Where, Words, find_file, read_toml, validate

_NUMBER = re.compile(r"(?<=^layers\.)\d+(?=\.|$)")
_OF_QUERIES_AND_KEYS = re.compile(r"\.self_attention\.[qk]_layernorm(\.|$)")
"""What ``transformer.qk_layernorm`` adds."""
_LAYER = "layers.*"
_MATRICES = {
    "embedding.word_embeddings": ("weight",),
    "embedding.position_embeddings": ("weight",),
    **dict.fromkeys(
        (
            *(f"{_LAYER}.input_layernorm", f"{_LAYER}.pre_mlp_layernorm", "final_layernorm"),
            *(f"{_LAYER}.self_attention.linear_{each}" for each in ("q", "k", "v", "proj")),
            *(f"{_LAYER}.mlp.linear_{each}" for each in ("gate", "up", "fc1", "fc2")),
            "output_layer",
        ),
        ("weight", "bias"),
    ),
    f"{_LAYER}.self_attention.core_attention": ("softmax_offset",),
}
PARAMETERS = tuple(f"{module}.{kind}" for module, kinds in _MATRICES.items() for kind in kinds)
"""What a Megatron-Core GPT can have, with the matrices of ``linear_qkv`` and of a gated
``linear_fc1`` apart."""
MODULES = (
    *("embedding", *_MATRICES, _LAYER, f"{_LAYER}.self_attention", f"{_LAYER}.mlp"),
    f"{_LAYER}.self_attention.linear_qkv",
)
"""Its modules."""
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
    place = _places(path)
    table = validate(MappingTable, tables, place, problems)
    if table is None:
        return None
    found = [
        *_name_problems(table.parameters, PARAMETERS, lambda key: place(f"parameters.{key}")),
        *_name_problems(table.modules, MODULES, lambda key: place(f"modules.{key}")),
    ]
    problems += found
    if found:
        return None
    return WeightMapping(
        table.parameters, table.modules, tuple(table.beside), table.rotary_interleaved
    )


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


def _name_problems(
    names: Mapping[str, str], known: Sequence[str], place: Where
) -> Iterator[Problem]:
    taken: dict[str, str] = {}
    for name, other in names.items():
        if _OF_QUERIES_AND_KEYS.search(name):
            yield Problem(
                place(name),
                "is a norm of queries or keys, which have no mapping yet "
                "(docs/across_frameworks.md)",
                "train without transformer.qk_layernorm",
            )
            continue
        if (general := _NUMBER.sub(ANY_LAYER, name, count=1)) not in known:
            yield Problem(
                place(name),
                "is not a name in the Megatron-Core GPT that converge builds",
                suggest(general, known),
            )
            continue
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
