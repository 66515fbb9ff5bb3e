"""Finite distributions whose probabilities are exact integers over 2**32.

Nothing here touches libm: a draw scales a 53-bit random number by a power of two and bisects
integers, so the same seed draws the same outcomes on every machine. Python guarantees that
``random.Random(seed).random()`` keeps its sequence across releases; it guarantees it for no other
method, so no other is used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from itertools import accumulate
from random import Random

TOTAL = 2**32
"""All probabilities are whole multiples of 1 / TOTAL."""

# Decimal's exp and ln are correctly rounded by specification, unlike those of libm.
_DECIMAL = Context(prec=28)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Outcomes 0 .. n-1; ``weights`` are positive integers that sum to ``TOTAL``."""

    weights: tuple[int, ...]
    cumulative: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[int]) -> Distribution:
        """Scale positive integer weights to ``TOTAL``; what rounding leaves goes to the largest."""
        whole = sum(weights)
        scaled = [max(1, weight * TOTAL // whole) for weight in weights]
        scaled[scaled.index(max(scaled))] += TOTAL - sum(scaled)
        return cls(tuple(scaled), tuple(accumulate(scaled)))

    def draw(self, random: Random) -> int:
        return bisect_right(self.cumulative, int(random.random() * TOTAL))

    def log_probability(self, outcome: int) -> float:
        """Natural logarithm of an outcome's probability."""
        return math.log(self.weights[outcome] / TOTAL)


def zipf(ranks: int) -> list[int]:
    """Integer weights proportional to 1 / (rank + 2), from the most frequent on."""
    return [TOTAL // (rank + 2) for rank in range(ranks)]


def log_normal(median: Decimal, sigma: Decimal, largest: int) -> list[int]:
    """Integer weights of 1 .. ``largest`` under a log-normal density with that median."""
    with localcontext(_DECIMAL):
        centre = median.ln()
        return [
            max(1, int(TOTAL * (-(((value.ln() - centre) / sigma) ** 2) / 2).exp() / value))
            for value in map(Decimal, range(1, largest + 1))
        ]
