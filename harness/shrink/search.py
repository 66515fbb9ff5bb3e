"""Searches for the smallest pair that still fails as before, by trying one change after another.

This is delta debugging with a list of changes instead of lines (Zeller and Hildebrandt,
"Simplifying and isolating failure-inducing input", 2002): the result is 1-minimal in its parts,
that is, without any single one of them the failure is gone, is another one, or cannot be judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from converge_harness.model import Experiment
from converge_harness.shrink.reductions import Reduction, reductions


class Effect(StrEnum):
    """What a smaller pair does."""

    SAME = "fails the same way"
    PASSES = "passes"
    OTHER = "fails otherwise"
    UNDECIDED = "cannot be judged"
    IMPOSSIBLE = "is not possible"


SILENT = (Effect.UNDECIDED, Effect.IMPOSSIBLE)
"""Effects that do not tell whether the failure is still there."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A pair that was run and judged."""

    effect: Effect
    said: str = ""
    """The cause, or why it is not possible; empty if it passes."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A change, what came of it, and how many changes had been made before."""

    reduction: Reduction
    trial: Trial
    after: int


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The smallest pair so far."""

    experiment: Experiment
    taken: tuple[Reduction, ...] = ()
    """The changes that led to it, in order."""
    refused: tuple[Tried, ...] = ()
    """Changes of it that do not keep the failure, each as last tried."""
    tried: int = 0
    """How many pairs were run or refused by the plan."""
    done: bool = False
    """Whether nothing is left to try; False while it searches, or if it was ended before."""

    @property
    def needed(self) -> tuple[Tried, ...]:
        """Parts without which it passes, or fails otherwise."""
        parts = (each for each in self.refused if each.reduction.part)
        return tuple(each for each in parts if each.trial.effect not in SILENT)

    @property
    def left(self) -> tuple[Tried, ...]:
        """Parts of which nobody knows whether it needs them: nothing without them can be judged."""
        parts = (each for each in self.refused if each.reduction.part)
        return tuple(each for each in parts if each.trial.effect in SILENT)


def search(
    start: Experiment,
    trial_of: Callable[[Reduction], Trial],
    may_go_on: Callable[[int], bool],
    tell: Callable[[Shrunk, Tried], None],
) -> Shrunk:
    """The smallest pair that fails as ``start`` does.

    Args:
        start: an experiment of one control and one test set that fails.
        trial_of: runs and judges the experiment that a change has made.
        may_go_on: whether the budget allows for another trial after so many.
        tell: gets the smallest pair so far after every trial, and that trial.
    """
    found = Shrunk(start)
    while (following := _next(found)) is not None:
        if not may_go_on(found.tried):
            return found
        tried = Tried(following, trial_of(following), len(found.taken))
        found = _after(found, tried)
        tell(found, tried)
    return Shrunk(found.experiment, found.taken, found.refused, found.tried, done=True)


def _next(found: Shrunk) -> Reduction | None:
    """The first change that was not tried; then parts that were, before others were taken."""
    before = {each.reduction.change: each for each in found.refused}
    every = list(reductions(found.experiment))
    untried = (each for each in every if each.change not in before)
    # A part that was needed by a larger pair may not be by this one.
    older = (each for each in every if each.part and before[each.change].after < len(found.taken))
    return next(untried, None) or next(older, None)


def _after(found: Shrunk, tried: Tried) -> Shrunk:
    change = tried.reduction.change
    others = tuple(each for each in found.refused if each.reduction.change != change)
    if tried.trial.effect is not Effect.SAME:
        before = next((each for each in found.refused if each.reduction.change == change), None)
        if before and tried.trial.effect in SILENT and before.trial.effect not in SILENT:
            tried = replace(tried, trial=before.trial)  # a larger pair says more
        return Shrunk(found.experiment, found.taken, (*others, tried), found.tried + 1)
    made = tried.reduction.made
    possible = {each.change for each in reductions(made)}
    # "tp 1 instead of 4" is no change of a pair that has tp 2 by now.
    kept = tuple(each for each in others if each.reduction.change in possible)
    return Shrunk(made, (*found.taken, tried.reduction), kept, found.tried + 1)
