"""The fewest jobs in which every pair of techniques meets: a covering array with constraints.

By the guide, a job that passes also vouches for every subset of its techniques. Which combinations
can be one job is enumerated (``converge_harness.guide.fit``); the smallest set of maximal ones that
covers every pair is found by integer programming.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from converge_harness.errors import ConfigError, Problem
from converge_harness.guide.base import Base
from converge_harness.guide.factor import Factor, ordered
from converge_harness.guide.fit import Combination, feasible, why_apart

TIME_LIMIT_S = 60.0
"""Time limit of the search for the fewest jobs. A real experiment takes milliseconds."""
HAS_PROOF = 0
"""``milp``'s status of a solution that is proved optimal."""


@dataclass(frozen=True, slots=True)
class TechniquePair:
    """Two techniques in one job, or one that can be combined with no other and is tested alone."""

    one: Factor
    other: Factor | None = None

    def __str__(self) -> str:
        return str(self.one) if self.other is None else f"{self.one} + {self.other}"


@dataclass(frozen=True, slots=True)
class ProposedJob:
    factors: tuple[Factor, ...]
    ranks: int
    first: tuple[TechniquePair, ...]
    """Pairs that no earlier job covers."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A pair that cannot be in one job."""

    pair: TechniquePair
    why: str


@dataclass(frozen=True, slots=True)
class Cover:
    """The proposed jobs, and what they were chosen from."""

    factors: tuple[Factor, ...]
    jobs: tuple[ProposedJob, ...]
    """Those that cover the most pairs come first."""
    pairs: int
    """Pairs that can meet: testing each separately would take as many jobs."""
    alone: int
    """Techniques that can be combined with no other."""
    combinations: int
    """Combinations of one or more techniques that can be one job."""
    apart: tuple[Apart, ...]
    at_most_more: int
    """By how many jobs this may exceed the minimum; 0: proved minimal."""


def cover_pairs(base: Base, factors: Sequence[Factor], gpus: int | None = None) -> Cover:
    """The fewest jobs that contain every factor and every pair of factors that can meet.

    Among covers with equally few jobs, the one with the fewest ranks in total.

    Args:
        base: the control of the jobs.
        factors: what is under test, with what it needs (``completed``).
        gpus: size of the largest job; None: no limit.

    Raises:
        ConfigError: a factor fits in no job, or there are too many combinations.
    """
    possible = feasible(base, factors, gpus)
    _require_all(base, factors, possible, gpus)
    largest = _largest(possible)
    wanted, apart = [], []
    for one, other in combinations(ordered(factors), 2):
        both = frozenset({one, other})
        if any(both <= each for each in largest):
            wanted.append(both)
        elif one.slot != other.slot:  # two degrees of one parallelism cannot meet
            apart.append(Apart(TechniquePair(one, other), why_apart(base, both, factors, gpus)))
    met = frozenset().union(*wanted)
    lone = [frozenset({each}) for each in ordered(factors) if each not in met]
    chosen, at_most_more = _fewest([*wanted, *lone], largest, possible)
    return Cover(
        factors=tuple(factors),
        jobs=_in_order(chosen, [*wanted, *lone], possible),
        pairs=len(wanted),
        alone=len(lone),
        combinations=len(possible),
        apart=tuple(apart),
        at_most_more=at_most_more,
    )


def _require_all(
    base: Base, factors: Sequence[Factor], possible: Mapping[Combination, int], gpus: int | None
) -> None:
    """Refuse a factor that fits in no job."""
    inside = frozenset().union(*possible)
    problems = [
        Problem(
            f"technique {each}",
            f"fits in no job on dp {base.dp}: " + why_apart(base, frozenset({each}), factors, gpus),
            "leave it out, or give it fewer ranks" if each.is_parallelism else "leave it out",
        )
        for each in factors
        if each not in inside
    ]
    if problems:
        raise ConfigError(problems)


def _largest(possible: Mapping[Combination, int]) -> list[Combination]:
    """Combinations that are not part of another: a cover needs no smaller one."""
    largest: list[Combination] = []
    for each in sorted(possible, key=lambda each: (-len(each), possible[each], _text(each))):
        if not any(each < other for other in largest):
            largest.append(each)
    return largest


def _text(combination: Combination) -> str:
    return " ".join(map(str, ordered(combination)))


def _fewest(
    wanted: Sequence[Combination], offered: Sequence[Combination], ranks: Mapping[Combination, int]
) -> tuple[list[Combination], int]:
    """The fewest of ``offered`` with all of ``wanted``, and the gap to the proved minimum."""
    holds = csr_array(
        np.array([[want <= each for each in offered] for want in wanted], dtype=np.float64)
    )
    every = LinearConstraint(holds, lb=1)
    ones = np.ones(len(offered))
    first, bound, proved = _solve(ones, [every])
    count = int(first.sum())
    at_most_more = 0 if proved else count - math.ceil(bound - 1e-6)
    # Among equally few jobs, prefer those with the fewest ranks.
    sizes = np.array([ranks[each] for each in offered], dtype=np.float64)
    few = LinearConstraint(csr_array(ones.reshape(1, -1)), ub=count)
    second, _, _ = _solve(sizes, [every, few])
    taken = second if second.sum() == count else first
    chosen = [each for each, used in zip(offered, taken, strict=True) if used]
    return chosen, at_most_more


def _solve(
    costs: np.ndarray[tuple[int], np.dtype[np.float64]], constraints: list[LinearConstraint]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], float, bool]:
    """The cheapest choice of columns, a lower bound of the cost, and whether it is proved optimal.

    All columns if time ran out before any choice was found.
    """
    result = milp(
        costs,
        constraints=constraints,
        integrality=np.ones(len(costs), dtype=np.int8),
        bounds=Bounds(0, 1),
        options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": 0.0},
    )
    bound = getattr(result, "mip_dual_bound", None)
    taken = np.ones(len(costs)) if result.x is None else result.x
    return taken > 0.5, 1.0 if bound is None else float(bound), result.status == HAS_PROOF  # noqa: PLR2004


def _in_order(
    chosen: Sequence[Combination], wanted: Sequence[Combination], ranks: Mapping[Combination, int]
) -> tuple[ProposedJob, ...]:
    """The jobs in greedy order: each covers the most pairs that earlier ones left."""
    left, jobs, rest = list(wanted), [], list(chosen)
    while rest:
        best = max(rest, key=lambda each: sum(want <= each for want in left))
        rest.remove(best)
        first = tuple(TechniquePair(*ordered(want)) for want in left if want <= best)
        left = [want for want in left if not want <= best]
        jobs.append(ProposedJob(ordered(best), ranks[best], first))
    return tuple(jobs)
