"""Every parameter's gradient against the control's over the sampled steps, as a map; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from converge_harness.judge import Comparisons
from converge_harness.model import Flags, Floats
from converge_harness.report.sanitize import plain
from converge_harness.wording import counted

MOST_ROWS = 120
"""A map of more parameters than this has a row per layer."""
_LAYER = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True, slots=True, eq=False)
class GradientMap:
    """Relative differences of gradients to the control's, each with its limit."""

    names: tuple[str, ...]
    """Labels of the rows: parameters, or layers, in the model's order."""
    steps: tuple[int, ...]
    """The columns."""
    difference: Floats
    """Shape (rows, steps): infinite where a gradient is missing or not finite."""
    limit: Floats
    """Shape (rows, steps)."""
    is_outside: Flags
    """Shape (rows, steps)."""
    parameters: int
    """How many parameters the rows stand for."""

    @property
    def outside(self) -> int:
        """How many cells are outside their limits."""
        return int(np.count_nonzero(self.is_outside))

    @property
    def summary(self) -> str:
        """One sentence above the map."""
        cells = counted(self.difference.size, "cell")
        of = counted(self.parameters, "parameter")
        rows = of if len(self.names) == self.parameters else f"{len(self.names)} layers ({of})"
        when = f"{rows}, {counted(len(self.steps), 'sampled step')}"
        return f"{when}: {self.outside} of {cells} outside the limit."


def gradient_map(every: Comparisons) -> GradientMap | None:
    """All gradients at all steps that both sampled; None when there is none."""
    compared = [(each.step, each.names, each.gradients) for each in every if each.gradients]
    if not compared:
        return None
    names = compared[0][1]
    compared = [each for each in compared if each[1] == names]
    order = sorted(range(len(names)), key=lambda index: _place(names[index]))
    difference, limit, excess, is_outside = (
        np.stack([getattr(found, what) for _, _, found in compared], axis=1)[order]
        for what in ("difference", "limit", "excess", "is_outside")
    )
    ordered = [names[index] for index in order]
    rows = (
        _layers(ordered)
        if len(names) > MOST_ROWS
        else {name: [i] for i, name in enumerate(ordered)}
    )
    # In every row and column, the parameter furthest beyond its limit, or nearest to it.
    chosen = np.stack([np.array(at)[np.argmax(excess[at], axis=0)] for at in rows.values()])
    columns = np.arange(len(compared))
    return GradientMap(
        names=tuple(plain(name) for name in rows),
        steps=tuple(step for step, _, _ in compared),
        difference=difference[chosen, columns],
        limit=limit[chosen, columns],
        is_outside=is_outside[chosen, columns],
        parameters=len(names),
    )


def _layers(names: Sequence[str]) -> dict[str, list[int]]:
    """Rows of each layer; a parameter outside of layers has its own."""
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        found = _LAYER.match(name)
        layers.setdefault(found[0] if found else name, []).append(index)
    return layers


def _place(name: str) -> tuple[int, list[tuple[int, str]]]:
    """A key that sorts in the model's order: embeddings, layers by number, the rest."""
    numbered = re.search(r"\d", name)
    stage = 0 if "embed" in name else 1 if numbered else 2
    parts = re.split(r"(\d+)", name)
    return stage, [(int(part), "") if part.isdigit() else (0, part) for part in parts]
