"""Maps parameter names of one trainer to names in another trainer's checkpoint.

Part of ``job.json``, which a rank reads: ``{"parameters": {…}, "modules": {…}, "beside": […],
"rotary_interleaved": true, "half_split": {…}}``. Both names may have one ``*``, for the layer's
number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
    half_split: dict[str, int]


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
    half_split: Mapping[str, int] = field(default_factory=dict)
    """Queries and keys of a user's program in which it rotates half-split, by their names in its
    model: rows of a head, all of which are rotated. Our own rank code knows its model's."""

    def parameter(self, name: str) -> str | None:
        """The tensor of the checkpoint; None if the mapping has none for this parameter."""
        return _translated(self.parameters, name)

    def module(self, name: str) -> str | None:
        """The module of the other model that computes the same; None if none does."""
        return _translated(self.modules, name)

    def order_of_rows(self, name: str) -> tuple[int, ...]:
        """Where the checkpoint has each row of a head of a parameter; empty: at the same place.

        ``name`` is the one in the model. Pair i of the rows that rotate together is i and i + half
        in the model, 2i and 2i + 1 in the checkpoint.
        """
        pattern = _matching(self.half_split, name)
        if pattern is None or not self.rotary_interleaved:
            return ()
        rows = self.half_split[pattern]
        return (*range(0, rows, 2), *range(1, rows, 2))

    def is_beside(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is not a weight."""
        return any(fnmatchcase(name, pattern) for pattern in self.beside)

    def document(self) -> WeightMappingDocument:
        """As JSON."""
        return {
            "parameters": dict(self.parameters),
            "modules": dict(self.modules),
            "beside": list(self.beside),
            "rotary_interleaved": self.rotary_interleaved,
            "half_split": dict(self.half_split),
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
        document.get("half_split") or {},
    )


def _translated(names: Mapping[str, str], name: str) -> str | None:
    pattern = _matching(names, name)
    if pattern is None:
        return None
    number = _NUMBER.search(name)
    return names[pattern] if number is None else names[pattern].replace(ANY_LAYER, number[0])


def _matching(patterns: Collection[str], name: str) -> str | None:
    """The pattern for a name: itself, or with a star for the number of its layer."""
    if name in patterns:
        return name
    general = _NUMBER.sub(ANY_LAYER, name, count=1)
    return general if general in patterns else None
