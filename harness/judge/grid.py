"""The steps at which a curve was logged: every one, every n-th, or doubling; what else is a hole.

Loggers write the first and the last step beside every n-th (1, 10, 20, …, 95), so the first and
the last distance may be shorter. A longer one than n is a hole, wherever it is: what happened in it
nobody saw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.model import Integers


class Hole(NamedTuple):
    """Steps that a curve should have by its own grid, and lacks."""

    first: int
    last: int
    spacing: int
    """Steps from one point to the next elsewhere."""

    @property
    def words(self) -> str:
        """``lacks steps 21 to 40, where it has every step``."""
        which = f"step {self.first}" if self.first == self.last else f"steps {self}"
        grid = "every step" if self.spacing == 1 else f"one step in {self.spacing}"
        return f"lacks {which}, where it has {grid} elsewhere"

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def spacing(steps: Integers) -> int:
    """The least distance of neighbouring points, the first and last pair aside; at least 1.

    ``steps`` has shape (points,) and increases.
    """
    gaps = np.diff(steps)
    inner = gaps[1:-1] if gaps.size > 2 else gaps[1:] if gaps.size > 1 else gaps  # noqa: PLR2004
    return int(inner.min(initial=2**62)) if inner.size else 1


def first_hole(steps: Integers) -> Hole | None:
    """The first distance that is longer than the grid's; None for a regular grid.

    ``steps`` has shape (points,) and increases.
    """
    if _doubles(steps):
        return None
    every = spacing(steps)
    long = np.flatnonzero(np.diff(steps) > every)
    if not long.size or steps.size <= 2:  # noqa: PLR2004 (one distance is regular)
        return None
    before, after = int(steps[long[0]]), int(steps[long[0] + 1])
    missing = range(before + every, after, every)
    return Hole(missing[0], missing[-1], every)


def _doubles(steps: Integers) -> bool:
    """Powers of two, or their like."""
    return bool(steps.size and steps[0] > 0 and np.all(steps[1:] == 2 * steps[:-1]))
