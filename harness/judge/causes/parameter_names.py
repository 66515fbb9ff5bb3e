"""Which parameters: names of many tensors folded into a short text that the user can check."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from converge_harness.wording import plural

MOST_PATTERNS = 5
"""How many folded names are written out."""

_LAYER = re.compile(r"^(?:(.*?)\.)?([0-9]+)\.(.*)$")
_ATTENTION = re.compile(r"attn|attention")
_OUTPUT = re.compile(r"^(.*\.)?(output|lm_head|output_layer|unembed\w*|head)\.")
_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b")
_NORM = re.compile(r"norm|\bln\b|ln_")


class ParameterRole(StrEnum):
    """What a parameter does in a transformer, as far as its name shows."""

    EMBEDDING = "embeddings"
    OUTPUT = "the output projection"
    NORM = "norms"
    ROUTER = "routers"
    EXPERTS = "experts"
    ATTENTION = "attention weights"
    FEED_FORWARD = "feed-forward weights"
    BIAS = "biases"
    OTHER = "other weights"


class ParameterPlace(NamedTuple):
    """Where in the model a parameter is."""

    stack: str
    """What comes before the layer's number: ``layers``."""
    layer: int | None
    module: str
    """The rest of the name, further numbers folded: ``attention.wq.weight``."""


def place_of(name: str) -> ParameterPlace:
    found = _LAYER.match(name)
    if not found:
        return ParameterPlace("", None, name)
    module = ".".join("*" if part.isdigit() else part for part in found[3].split("."))
    return ParameterPlace(found[1] or "", int(found[2]), module)


def role_of(name: str) -> ParameterRole:
    """From the usual names of torchtitan, Megatron-LM and Hugging Face."""
    last = name.rsplit(".", 1)[-1]
    if _NORM.search(name.rsplit(".", 2)[-2] if name.count(".") else name):
        return ParameterRole.NORM
    if last == "bias" or last.endswith("_bias"):
        return ParameterRole.BIAS
    for role, matches in (
        (ParameterRole.ROUTER, "router" in name or ".gate.weight" in name),
        (ParameterRole.EXPERTS, "expert" in name),
        (ParameterRole.ATTENTION, _ATTENTION.search(name) is not None),
        (ParameterRole.EMBEDDING, _EMBEDDING.search(name) is not None),
        (ParameterRole.OUTPUT, place_of(name).layer is None and _OUTPUT.search(name) is not None),
        (ParameterRole.FEED_FORWARD, re.search(r"feed_forward|mlp|ffn", name) is not None),
    ):
        if matches:
            return role
    return ParameterRole.OTHER


def layers_of(names: Iterable[str]) -> list[int]:
    """Layer numbers, in order; empty for a model with several stacks, whose order is not known."""
    places = [place for name in names if (place := place_of(name)).layer is not None]
    if len({place.stack for place in places}) > 1:
        return []
    return sorted({place.layer for place in places if place.layer is not None})


def depth_of(name: str, last: int) -> int:
    """Distance from the input: embeddings come before layer 0, all else outside after the last."""
    layer = place_of(name).layer
    if layer is not None:
        return layer
    return -1 if role_of(name) is ParameterRole.EMBEDDING else last + 1


def describe(names: Collection[str], among: Sequence[str]) -> str:
    """Names some of a model's parameters, as shortly as possible."""
    if len(names) == len(among):
        return f"all {len(among)} parameters"
    if len(names) == 1:
        return next(iter(names))
    whole = _whole_layers(names, among)
    if whole:
        return whole
    patterns = fold(names, among)
    listed = joined(patterns[:MOST_PATTERNS])
    more = len(patterns) - MOST_PATTERNS
    listed += f" and {more} more" if more > 0 else ""
    roles = {role_of(name) for name in names}
    if len(roles) == 1:
        (role,) = roles
        if {name for name in among if role_of(name) is role} == set(names):
            return f"all {role} ({listed})"
    return listed


def fold(names: Iterable[str], among: Iterable[str]) -> list[str]:
    """Names with their layers folded: ``layers.*.attention.wq.weight``, ``layers.2-3.…``."""
    everywhere: dict[tuple[str, str], set[int]] = {}
    for name in among:
        stack, layer, module = place_of(name)
        if layer is not None:
            everywhere.setdefault((stack, module), set()).add(layer)
    here: dict[tuple[str, str], set[int]] = {}
    folded = []
    for name in names:
        stack, layer, module = place_of(name)
        if layer is None:
            folded.append(name)
        else:
            here.setdefault((stack, module), set()).add(layer)
    for (stack, module), layers in here.items():
        every = layers == everywhere.get((stack, module)) and len(layers) > 1
        prefix = f"{stack}." if stack else ""
        folded.append(f"{prefix}{'*' if every else spans(layers)}.{module}")
    return sorted(folded)


def spans(numbers: Collection[int]) -> str:
    """``0, 2-4``."""
    parts: list[str] = []
    ordered = sorted(numbers)
    start = 0
    for index, number in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != number + 1:
            first = ordered[start]
            parts.append(f"{first}-{number}" if number > first else f"{first}")
            start = index + 1
    return ", ".join(parts)


def joined(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _whole_layers(names: Collection[str], among: Sequence[str]) -> str:
    """``layers 2-3, norm.weight and output.weight``, if the layers are there in full."""
    chosen, layers = set(names), layers_of(names)
    if not layers or not layers_of(among):
        return ""
    if any(name not in chosen for name in among if place_of(name).layer in layers):
        return ""
    outside = sorted(name for name in names if place_of(name).layer is None)
    return joined([f"{plural(len(layers), 'layer')} {spans(layers)}", *outside])
