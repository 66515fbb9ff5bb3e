"""Where in the model gradients are furthest off: by layer and branch.

A layer of a transformer adds what its branches (attention, feed-forward) make of the residual
stream. What goes wrong inside of one branch spoils that branch's own gradients by far more than any
others, for the residual stream carries most of both passes around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np

from harness.judge.causes.groups import place_of, spans
from harness.judge.tensors import TensorComparison
from harness.model import Floats

ATTENTION, FEED_FORWARD, EXPERTS = "attention", "feed-forward", "mixture of experts"
_BRANCHES = (
    (EXPERTS, re.compile(r"moe|expert|router")),
    (FEED_FORWARD, re.compile(r"feed_forward|mlp|ffn|post_attention|\bln_2\b")),
    (ATTENTION, re.compile(r"attn|attention|input_layernorm|\bln_1\b")),
)
"""The first that matches: Llama's ``post_attention_layernorm`` comes before the feed-forward."""
_LAST = re.compile(
    r"\b(wo|w2|o_proj|out_proj|c_proj|down_proj|linear_proj|linear_fc2|dense|dense_4h_to_h)\b"
)
"""The last weight of a branch: its gradient is what the branch made of its input, times the
gradient of the residual stream."""
STANDS_OUT = 3.0
"""A place is off by this many times as much as all others."""
_COMPARABLE = 0.2
"""Share of the place's own difference."""
_FEWEST_LAYERS = 2
_LEAST = 1e-4
"""Of the furthest: how much nearer others are than this says nothing."""


class Spot(NamedTuple):
    """A branch of some layers, whose gradients are further off than all others."""

    kind: str
    layers: tuple[int, ...]
    every: bool
    """Whether these are all layers."""
    apart: float
    """What they are off by, in the median."""
    others: float
    """The same of the branch or parameter that comes next."""
    last_too: bool
    """Whether the last weight of the branch is off about as much, in each of these layers."""

    @property
    def words(self) -> str:
        if self.every:
            return f"the {self.kind} of every layer"
        return f"the {self.kind} of layer{'s' * (len(self.layers) > 1)} {spans(self.layers)}"


def branch_of(name: str) -> tuple[int, str] | None:
    """Layer and branch of a parameter; None where it is in no layer, or in none known."""
    place = place_of(name)
    if place.layer is None:
        return None
    kind = next((kind for kind, found in _BRANCHES if found.search(place.module)), None)
    return (place.layer, kind) if kind is not None else None


def spot(sample: TensorComparison | None) -> Spot | None:
    """The one place whose gradients stand out; None where there is no such."""
    if sample is None or sample.gradients is None:
        return None
    return spot_of(sample.names, sample.gradients.difference)


def spot_of(names: Sequence[str], difference: Floats) -> Spot | None:
    """The same of what each parameter is off by."""
    branches: dict[tuple[int, str] | str, list[int]] = {}
    for index, name in enumerate(names):
        if np.isfinite(difference[index]):
            branches.setdefault(branch_of(name) or name, []).append(index)
    apart = {branch: float(np.median(difference[members])) for branch, members in branches.items()}
    order = sorted(apart, key=lambda branch: -apart[branch])
    layers = {branch[0] for branch in order if isinstance(branch, tuple)}
    if len(layers) < _FEWEST_LAYERS or not apart[order[0]]:
        return None
    falling = [max(apart[branch], _LEAST * apart[order[0]]) for branch in order]
    kinds = [branch[1] if isinstance(branch, tuple) else None for branch in order]
    alike = sum(1 for _ in takewhile(lambda kind: kind == kinds[0], kinds)) if kinds[0] else 0
    gaps = [one / other for one, other in pairwise(falling[: alike + 1])]
    count = int(np.argmax(gaps)) + 1 if gaps else 0
    chosen = [branch for branch in order[:count] if isinstance(branch, tuple)]
    if not chosen or gaps[count - 1] < STANDS_OUT:
        return None
    here = sorted(layer for layer, _ in chosen)
    median = float(np.median([apart[branch] for branch in chosen]))
    last_too = all(
        _last_off(difference[i] for i in branches[branch] if _LAST.search(names[i]))
        >= _COMPARABLE * apart[branch]
        for branch in chosen
    )
    every = set(here) == layers
    return Spot(chosen[0][1], tuple(here), every, median, apart[order[count]], last_too)


def _last_off(differences: Iterable[float]) -> float:
    return max(differences, default=0.0)
