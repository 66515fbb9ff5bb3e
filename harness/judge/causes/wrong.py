"""The gradients of one sample that are outside their limits, sorted by how they are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from harness.judge.causes.groups import joined
from harness.judge.causes.sorting import Sorting, sort
from harness.judge.tensors import TensorComparison, TensorDifferences
from harness.model import Integers, TensorRows

NAMED = 3
"""How many tensors a sentence names one by one."""


class Wrong(NamedTuple):
    """A sample with gradients outside their limits."""

    step: int
    names: tuple[str, ...]
    sizes: Integers
    test: TensorRows
    control: TensorRows
    found: TensorDifferences
    sorting: Sorting

    def named(self, indices: Iterable[int]) -> list[str]:
        return [self.names[index] for index in indices]

    @property
    def among(self) -> list[str]:
        """All parameters with a gradient on either side."""
        return self.named(self.sorting.judged)

    @property
    def off(self) -> list[str]:
        return self.named(self.sorting.off)


def wrong_gradients(sample: TensorComparison | None) -> Wrong | None:
    """None when the sample has none, or they are all inside."""
    if sample is None or sample.gradients is None or not sample.gradients.outside.size:
        return None
    ours, theirs = sample.test.gradients, sample.control.gradients
    if ours is None or theirs is None:
        return None
    sorting = sort(ours.sketch, theirs.sketch, sample.gradients)
    sizes = sample.control.sizes
    return Wrong(sample.step, sample.names, sizes, ours, theirs, sample.gradients, sorting)


def worst_words(wrong: Wrong) -> str:
    """The furthest tensors with relative difference, best factor and what it leaves."""
    sorting, difference = wrong.sorting, wrong.found.difference
    words = []
    for index in sorting.turned[:NAMED]:
        if np.isfinite(sorting.factors[index]):
            best = f"best factor {sorting.factors[index]:.3g}, which leaves "
            left = f"{best}{sorting.residuals[index]:.2g}"
            words.append(f"{wrong.names[index]} by {difference[index]:.2g} ({left})")
        else:
            words.append(f"{wrong.names[index]} (no multiple of the control's)")
    return joined(words)
