"""Which sampled steps, and which ranks, drop the same units of a model, by sums over dropout masks.

It needs no states of generators: masks that are drawn from a generator that is seeded anew each
time, or by its rank in the wrong way, are the same masks whatever the states look like.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from converge_harness.model import DropoutMasks, Evidence

_ENOUGH = 16
"""Units dropped, and units kept, of masks that cannot be the same by chance: of 32 units of which
16 are kept there are 6e8 choices."""

_SIGMAS = 6.0
"""Standard deviations by which shares of dropped units differ by chance once in 10^9."""


class MasksAgain(NamedTuple):
    """A sampled step whose masks are those of an earlier one."""

    step: int
    of: int


def masks_by_step(run: Evidence) -> dict[int, frozenset[str]]:
    """The sums of all ranks whose masks cannot be the same by chance, by sampled step."""
    found = {each.step: frozenset(_telling(each)) for each in run.masks}
    return {step: sums for step, sums in found.items() if sums}


def _telling(masks: DropoutMasks) -> list[str]:
    ranks = zip(masks.units, masks.kept, masks.sums, strict=True)
    return [sums for units, kept, sums in ranks if min(kept, units - kept) >= _ENOUGH]


def masks_again(test: Evidence, control: Evidence) -> MasksAgain | None:
    """The first step at which every rank drops the units that it, or another, dropped before.

    Not if the control does the same at these steps, as if it were meant, or if it is not known.
    """
    ours, theirs = masks_by_step(test), masks_by_step(control)
    steps = sorted(ours.keys() & theirs.keys())
    for step in steps:
        for of in steps:
            if of < step and ours[step] <= ours[of] and not theirs[step] <= theirs[of]:
                return MasksAgain(step, of)
    return None


def masks_shared(run: Evidence) -> dict[int, bool]:
    """By sampled step, whether ranks that train on other samples drop the same units."""
    told = masks_by_step(run)
    return {
        each.step: each.shared
        for each in run.masks
        if each.shared is not None and each.step in told
    }


def first_shared(test: Evidence, control: Evidence) -> int | None:
    """The first step at which such ranks drop the same units; None if the control's ever do."""
    theirs = masks_shared(control)
    if not theirs or any(theirs.values()):
        return None
    return next((step for step, alike in masks_shared(test).items() if alike), None)


def first_other(test: Evidence, control: Evidence) -> int | None:
    """The first sampled step at which the test set keeps more or fewer of as many units.

    Then its masks are others. Equal numbers show nothing, and neither do other sums: the same
    masks have other sums on other ranks, or in calls of other microbatches. Of more or fewer units
    masks may be the same: activation checkpointing counts them twice, and ranks may hold copies.
    """
    told = masks_by_step(test).keys() & masks_by_step(control).keys()
    theirs = {each.step: (sum(each.units), sum(each.kept)) for each in control.masks}
    for each in test.masks:
        if each.step in told and each.step in theirs:
            units, kept = theirs[each.step]
            if sum(each.units) == units and sum(each.kept) != kept:
                return each.step
    return None


def share_dropped(run: Evidence, steps: Collection[int]) -> float | None:
    """The share of units that are dropped at the first of some steps that was sampled."""
    told = masks_by_step(run)
    for each in run.masks:
        if each.step in steps and each.step in told:
            return 1 - sum(each.kept) / sum(each.units)
    return None


def other_rates(test: Evidence, control: Evidence, step: int) -> tuple[float, float] | None:
    """The shares of units that both drop at a step, if they are further apart than by chance.

    Masks of ranks may be the same, so as many independent units count as one rank has, and half of
    them: activation checkpointing counts masks twice.
    """
    ours, theirs = (
        next(each for each in run.masks if each.step == step) for run in (test, control)
    )
    one, other = (1 - sum(each.kept) / sum(each.units) for each in (ours, theirs))
    independent = min(max(each.units) for each in (ours, theirs)) / 2
    both = (one + other) / 2
    spread = math.sqrt(2 * both * (1 - both) / independent)
    return (one, other) if abs(one - other) > _SIGMAS * spread else None


def step_before(run: Evidence, step: int) -> int:
    """The sampled step before one; 0 if it is the first, or the steps are not known."""
    return max((each for each in run.sample_steps or () if each < step), default=0)
