"""What may run in one job: asked of the rules, of the trainer, and of the number of GPUs.

What a trainer's release refuses, or silently makes another run of, its trainer tells, with the
source. That is asked only when sets are proposed: a set that somebody writes by hand is checked by
the trainer itself.
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
"""The rule that says what a technique stands on."""
LEAST = (Factor("tp", 2), Factor("cp", 2), Factor("pp", 2))
"""The least degree of a parallelism that a technique may need."""
MOST_NEEDED = 3
"""No technique needs more than so many others."""
MOST_COMBINATIONS = 50_000
"""More are not looked at."""

Combination = frozenset[Factor]


def completed(base: Base, named: Sequence[Factor]) -> tuple[Factor, ...]:
    """The factors with what they need and nobody named: compile and ``tp=2`` of async TP."""
    found = list(named)
    for factor in named:
        supported = standing(base, frozenset({factor}), found)
        found += [each for each in _offered(found) if each in (supported or ())]
    return tuple(dict.fromkeys(found))


def standing(base: Base, factors: Combination, named: Sequence[Factor]) -> Combination | None:
    """The smallest combination in which these factors have what they need, by rule.

    Those of ``named`` are preferred to others. None when there is no such combination.
    """
    offered = [each for each in (*named, *_offered(named)) if each not in factors]
    for count in range(MOST_NEEDED + 1):
        for more in combinations(offered, count):
            tried = factors | set(more)
            if _slots_are_single(tried) and not list(_rule_findings(base, tried, (NEEDS,))):
                return tried
    return None


def _offered(named: Sequence[Factor]) -> list[Factor]:
    """What could be added to the named ones: techniques, and parallelisms that are not there."""
    taken = {factor.slot for factor in named}
    least = [each for each in LEAST if each.slot not in taken]
    return [*least, *(Factor(each) for each in map(str, Technique) if each not in taken)]


def breaches(base: Base, factors: Combination, gpus: int | None = None) -> list[str]:
    """Why these factors cannot be one job; empty when they can.

    Args:
        base: the control that the job stands beside.
        factors: what the job is to hold.
        gpus: how many there are; None: as many as it takes.
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
    """How many: dp x tp x cp x pp, since expert parallelism borrows its ranks."""
    size = base.dp
    for factor in factors:
        if factor.slot in ("tp", "cp", "pp"):
            size *= factor.degree
    return size


def feasible(
    base: Base, factors: Sequence[Factor], gpus: int | None = None
) -> Mapping[Combination, int]:
    """Every combination of one factor or more that can be one job, with its ranks.

    Raises:
        ConfigError: there are more than ``MOST_COMBINATIONS`` to look at.
    """
    choices = [[None, *(each for each in factors if each.slot == slot)] for slot in SLOTS]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            Problem(
                "--cover",
                f"{len(factors)} techniques have {count:,} combinations; at most "
                f"{MOST_COMBINATIONS:,} are looked at",
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
    """Why no job holds these factors, told of the smallest combination in which they stand."""
    doubled = list(_doubled(factors))
    if doubled:
        return doubled[0]
    supported = standing(base, factors, named)
    if supported is None:
        each_alone = [standing(base, frozenset({factor}), named) for factor in factors]
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
