"""Which names a mapping of Megatron-Core's parameters may have.

They are those of the layers that converge builds, with the matrices of ``linear_qkv`` and of a
gated ``linear_fc1`` apart (``PARAMETERS``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from converge_harness.errors import Problem, suggest
from converge_harness.run_folder.weight_mapping import ANY_LAYER
from converge_harness.toml import Where
from converge_harness.trainers.mapping import MappingTable

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


def name_problems(table: MappingTable, place: Where) -> Iterator[Problem]:
    """Names on the left that the layers do not have, and what has no mapping yet."""
    yield from _of_layers(table.parameters, PARAMETERS, lambda key: place(f"parameters.{key}"))
    yield from _of_layers(table.modules, MODULES, lambda key: place(f"modules.{key}"))
    for name in table.half_split:
        yield Problem(
            place(f"half_split.{name}"),
            "is for a user's program: Megatron-Core's model says how it rotates",
            "leave it out",
        )


def _of_layers(names: Mapping[str, str], known: Sequence[str], place: Where) -> Iterator[Problem]:
    for name in names:
        if _OF_QUERIES_AND_KEYS.search(name):
            yield Problem(
                place(name),
                "is a norm of queries or keys, which have no mapping yet "
                "(docs/across_frameworks.md)",
                "train without transformer.qk_layernorm",
            )
        elif (general := _NUMBER.sub(ANY_LAYER, name, count=1)) not in known:
            yield Problem(
                place(name),
                "is not a name in the Megatron-Core GPT that converge builds",
                suggest(general, known),
            )
