"""Of which part of the model a reported grad norm is the norm: the squares of norms add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from harness.judge.agreement import Agreement
from harness.judge.causes.families import stage_words
from harness.judge.causes.groups import depth_of, describe, layers_of, role_of
from harness.judge.scene import Scene
from harness.model import Flags, Floats

_FEWEST_SAMPLES = 2
_SHARE = 0.3
"""Of the limit of agreement, that a part's norm may be off by: parts are many."""


class _Part(NamedTuple):
    """A sum over some parameters of squares, which are counted a number of times."""

    times: Floats
    """Shape (parameters,)."""
    words: str


def part_words(compared: Agreement, scene: Scene) -> str:
    """``the norm of layers 2-3 alone``; empty where none fits, or several do."""
    at = {int(step): index for index, step in enumerate(compared.steps)}
    samples = [each for each in scene.case.test.samples if each.step in at and each.gradients]
    if len(samples) < _FEWEST_SAMPLES:
        return ""
    names = samples[0].names
    squares = np.array([each.gradients.norm**2 for each in samples if each.gradients])
    reported = np.array([compared.reported[at[each.step]] for each in samples])
    allowed = _SHARE * compared.limit.value * reported
    found: dict[bytes, str] = {}
    for part in _parts(names, scene):
        if np.all(np.abs(np.sqrt(squares @ part.times) - reported) <= allowed):
            found.setdefault(part.times.tobytes(), part.words)
    return next(iter(found.values())) if len(found) == 1 else ""


def _parts(names: Sequence[str], scene: Scene) -> Iterator[_Part]:
    for chosen in _choices(names):
        if chosen.all() or not chosen.any():
            continue
        for kept in (chosen, ~chosen):
            yield _Part(kept.astype(np.float64), _alone(kept, names, scene))
        which = describe(_chosen(names, chosen), names)
        for name, degree in scene.degrees.items():
            if isinstance(degree, int) and degree > 1:
                words = f"{which} counted {degree} times, once by each {name} rank"
                more = (degree - 1) * chosen.astype(np.float64)
                yield _Part(np.asarray(1.0 + more, dtype=np.float64), f"the norm with {words}")


def _alone(kept: Flags, names: Sequence[str], scene: Scene) -> str:
    """By what is in or by what is not, whichever is less to say; a stage by what it holds."""
    inside, outside = _chosen(names, kept), _chosen(names, ~kept)
    stage = stage_words(inside, names, scene)
    if len(inside) > len(outside) and not stage:
        return f"the norm without {describe(outside, names)}"
    return f"the norm of {describe(inside, names)}{stage} alone"


def _chosen(names: Sequence[str], flags: Flags) -> list[str]:
    return [name for name, here in zip(names, flags, strict=True) if here]


def _choices(names: Sequence[str]) -> Iterator[Flags]:
    """The beginnings of the model, each kind of parameter, each parameter."""
    layers = layers_of(names)
    if layers:
        depths = np.array([depth_of(name, layers[-1]) for name in names])
        yield from (depths < cut for cut in range(layers[-1] + 2))
    roles = [role_of(name) for name in names]
    yield from (np.array([role is each for role in roles]) for each in dict.fromkeys(roles))
    yield from np.eye(len(names), dtype=np.bool_)
