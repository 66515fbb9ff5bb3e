"""Maps parameter names of one trainer to names in another trainer's checkpoint.

Part of ``job.json``, which a rank reads: ``{"parameters": {…}, "modules": {…}, "beside": […],
"rotary_interleaved": true}``. Both names may have one ``*``, for the layer's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypedDict

ANY_LAYER = "*"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name that is a number."""


class WeightMappingDocument(TypedDict):
    """As JSON."""

    parameters: dict[str, str]
    modules: dict[str, str]
    beside: list[str]
    rotary_interleaved: bool


@dataclass(frozen=True, slots=True)
class WeightMapping:
    """Names of one trainer's model, and those that another trainer's model has for the same."""

    parameters: Mapping[str, str]
    """By the name in the model that trains, the tensor of the checkpoint. Of a parameter that is
    several matrices in one, each matrix has a name."""
    modules: Mapping[str, str]
    """The same for modules that compute the same, of which outputs are compared."""
    beside: Sequence[str]
    """Patterns of tensors in the checkpoint that are no weights, such as ``optimizer.*``."""
    rotary_interleaved: bool
    """Rotary embedding of the other model: True is interleaved (rows 0 and 1 of queries and keys
    rotate together), False half-split (a row of one half of a head with one of the other)."""

    def parameter(self, name: str) -> str | None:
        """The tensor of the checkpoint; None if the mapping has none for this parameter."""
        return _translated(self.parameters, name)

    def module(self, name: str) -> str | None:
        """The module of the other model that computes the same; None if none does."""
        return _translated(self.modules, name)

    def is_beside(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is no weight."""
        return any(fnmatchcase(name, pattern) for pattern in self.beside)

    def document(self) -> WeightMappingDocument:
        """As JSON."""
        return {
            "parameters": dict(self.parameters),
            "modules": dict(self.modules),
            "beside": list(self.beside),
            "rotary_interleaved": self.rotary_interleaved,
        }


def weight_mapping_of(document: WeightMappingDocument | None) -> WeightMapping | None:
    """The mapping of a ``job.json``; None if it has none. Raises KeyError for a missing key."""
    if document is None:
        return None
    return WeightMapping(
        document["parameters"],
        document["modules"],
        tuple(document["beside"]),
        document["rotary_interleaved"],
    )


def _translated(names: Mapping[str, str], name: str) -> str | None:
    if name in names:
        return names[name]
    number = _NUMBER.search(name)
    if number is None:
        return None
    pattern = f"{name[: number.start()]}{ANY_LAYER}{name[number.end() :]}"
    return names[pattern].replace(ANY_LAYER, number[0]) if pattern in names else None
