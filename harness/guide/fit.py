"""What may run in one job, by the rules, the trainer, and the number of GPUs.

Each trainer lists what its release refuses or silently ignores, with the source. This list is used
only to propose sets: a set written by hand is checked by the trainer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

from converge_harness.errors import ConfigError, Problem
from converge_harness.guide.base import Base
from converge_harness.guide.factor import DDP, HSDP, SLOTS, Factor
from converge_harness.model import Technique
from converge_harness.plan.rules import RULES
from converge_harness.trainers import trainer_of

NEEDS = "technique-needs"
"""The rule on what a technique needs."""
LEAST = (Factor("tp", 2), Factor("cp", 2), Factor("pp", 2))
"""Degree of a parallelism that is added because a technique needs it."""
MOST_NEEDED = 3
"""Most others that a technique needs."""
MOST_COMBINATIONS = 50_000
"""Most combinations that are enumerated."""

Combination = frozenset[Factor]


def completed(base: Base, named: Sequence[Factor]) -> tuple[Factor, ...]:
    """The factors plus those that they need, such as compile and ``tp=2`` for async TP."""
    found = list(named)
    for factor in named:
        supported = with_needs(base, frozenset({factor}), found)
        found += [each for each in _offered(found) if each in (supported or ())]
    return tuple(dict.fromkeys(found))


def with_needs(base: Base, factors: Combination, named: Sequence[Factor]) -> Combination | None:
    """The smallest combination with these factors and all that the rules say they need.

    Factors of ``named`` are preferred. None if there is no such combination.
    """
    offered = [each for each in (*named, *_offered(named)) if each not in factors]
    for count in range(MOST_NEEDED + 1):
        for more in combinations(offered, count):
            tried = factors | set(more)
            if _slots_are_single(tried) and not list(_rule_findings(base, tried, (NEEDS,))):
                return tried
    return None


def _offered(named: Sequence[Factor]) -> list[Factor]:
    """Factors that could be added: techniques, and parallelisms that were not named."""
    taken = {factor.slot for factor in named}
    least = [each for each in LEAST if each.slot not in taken]
    return [*least, *(Factor(each) for each in map(str, Technique) if each not in taken)]


def breaches(base: Base, factors: Combination, gpus: int | None = None) -> list[str]:
    """Why these factors cannot be one job; empty if they can.

    Args:
        base: the control of the job.
        factors: the factors of the job.
        gpus: the number of GPUs; None: no limit.
    """
    doubled = list(_doubled(factors))
    if doubled:
        return doubled
    unsharded = [
        f"{each} does not leave two ranks or more of dp {base.dp} to shard over"
        for each in factors
        if each.variant == HSDP and (base.dp % each.degree or base.dp == each.degree)
    ]
    if base.dp == 1 and any(each.variant == DDP for each in factors):
        unsharded.append("DDP on one rank replicates nothing")
    if unsharded:
        return unsharded
    found = []
    needed = ranks(base, factors)
    if gpus is not None and needed > gpus:
        found.append(f"it takes {needed} ranks, and there are {gpus} GPUs")
    found += _rule_findings(base, factors, tuple(RULES))
    spec = base.spec(factors)
    limits = trainer_of(spec).limitations(spec, base.control.toolchain)
    found += [f"{each.says} ({each.source})" for each in limits]
    return found


def ranks(base: Base, factors: Combination) -> int:
    """Number of ranks: dp x tp x cp x pp; expert parallelism adds none."""
    size = base.dp
    for factor in factors:
        if factor.slot in ("tp", "cp", "pp"):
            size *= factor.degree
    return size


def feasible(
    base: Base, factors: Sequence[Factor], gpus: int | None = None
) -> Mapping[Combination, int]:
    """Every combination of one or more factors that can be one job, with its ranks.

    Raises:
        ConfigError: there would be more than ``MOST_COMBINATIONS``.
    """
    slots = dict.fromkeys((*SLOTS, *(each.slot for each in factors)))
    choices = [[None, *(each for each in factors if each.slot == slot)] for slot in slots]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            Problem(
                "--cover",
                f"{len(factors)} techniques have {count:,} combinations; at most "
                f"{MOST_COMBINATIONS:,} can be tried",
                "name fewer degrees with --technique",
            )
        )
    found = {}
    for chosen in product(*choices):
        combination = frozenset(each for each in chosen if each is not None)
        needed = ranks(base, combination)
        if not combination or (gpus is not None and needed > gpus):
            continue
        if not breaches(base, combination, gpus):
            found[combination] = needed
    return found


def why_apart(base: Base, factors: Combination, named: Sequence[Factor], gpus: int | None) -> str:
    """Why no job can have these factors, for the smallest combination that has what they need."""
    doubled = list(_doubled(factors))
    if doubled:
        return doubled[0]
    supported = with_needs(base, factors, named)
    if supported is None:
        each_alone = [with_needs(base, frozenset({factor}), named) for factor in factors]
        all_needed = factors.union(*(each for each in each_alone if each is not None))
        return "; ".join(_rule_findings(base, all_needed, (NEEDS,)))
    reasons = breaches(base, supported, gpus)
    return "; ".join(reasons) or "what they need cannot run in any job that fits"


def _slots_are_single(factors: Combination) -> bool:
    return len({factor.slot for factor in factors}) == len(factors)


def _doubled(factors: Combination) -> Iterator[str]:
    for one, other in combinations(sorted(factors, key=str), 2):
        if one.slot == other.slot:
            yield f"{one} and {other} are two values of one choice"


def _rule_findings(base: Base, factors: Combination, names: Sequence[str]) -> Iterator[str]:
    case = base.case(base.spec(factors))
    for name in names:
        for finding in RULES[name].check(case):
            yield f"{finding.message} [{name}]"
