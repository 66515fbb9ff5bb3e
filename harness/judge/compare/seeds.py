"""Two groups of runs, each of several seeds: whether their losses differ by more than a margin.

Runs of different seeds have nothing in common at a single step: other initial weights, other
samples. What they have in common is the loss that they reach. So every seed gives one number, its
**level**: the mean loss over the second half of its steps. Two groups of levels are two samples of
independent numbers, however correlated neighbouring steps of one run are.

* **Level**: Welch's t of the difference of the two means, with Welch's and Satterthwaite's degrees
  of freedom (Welch 1947, "The generalization of 'Student's' problem when several different
  population variances are involved", Biometrika 34; Satterthwaite 1946, "An approximate
  distribution of estimates of variance components", Biometrics Bulletin 2): the groups may have
  other spreads and other numbers of seeds. Against a margin: two one-sided tests (Schuirmann 1987)
  for *the same*, one of them for *no worse*.
* **Pairs**: where both sides were trained with the same seeds, on the same samples, the effect of a
  seed on both cancels in its difference. Student's t of the differences: Welch's with a control
  that is known (:func:`pair_groups`).
* **Trajectory**: the same of the means of a few blocks of the run, each with its share of the level
  of all (Bonferroni). It looks for a difference, and does not prove equivalence: a block that does
  not show one is no evidence that there is none.
* **Plan**: how many more seeds a side, or how many steps, would settle an open question. The spread
  of a few seeds may be smaller than the true one by chance, so a plan is made for its upper 80%
  confidence limit (Browne 1995, "On the use of a pilot sample for sample size determination",
  Statistics in Medicine 14).

Assumed: seeds are independent of each other within a group, and their levels are roughly normal.
How often the answers are wrong is measured in ``docs/operating-characteristics.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from converge_harness.judge.compare.tost import ALPHA, CHANCE, FEWEST, LONGEST, Answer, mean_error
from converge_harness.model import Floats

FEWEST_SEEDS = 2
"""Per side: one run does not show its own spread."""

BLOCKS = 8
"""Blocks of a trajectory; fewer where a block would have fewer than two steps."""

MOST_SEEDS = 1000
"""Nobody trains a model more often: a plan that needs more is not given."""

_HALVINGS = 7
"""A planned length is searched to within this factor."""

_CONFIDENCE = 0.8
"""Probability that the true spread is not above the one that a plan is made for."""


class Group(NamedTuple):
    """One number over the seeds of one side."""

    seeds: int
    mean: float
    variance: float
    """Between seeds, of one seed: with ``seeds - 1`` in the denominator."""

    @classmethod
    def of(cls, values: Floats) -> Group:
        """``values`` has shape (seeds,), of at least :data:`FEWEST_SEEDS`."""
        return cls(int(values.size), float(np.mean(values)), float(np.var(values, ddof=1)))


def pair_groups(test: Floats, control: Floats) -> tuple[Group, Group]:
    """Test and control, paired by seed; both have shape (seeds,).

    The spread is that of the differences, and the control is taken as known: :func:`welch` of the
    two is then Student's t of the differences, with ``seeds - 1`` degrees of freedom.
    """
    spread = Group.of(test - control).variance
    levels = Group.of(control)
    return Group.of(test)._replace(variance=spread), levels._replace(variance=0.0)


def groups_of(test: Floats, control: Floats, *, paired: bool) -> tuple[Group, Group]:
    """The means of runs over a window; both have shape (seeds, steps)."""
    levels = test.mean(axis=1), control.mean(axis=1)
    return pair_groups(*levels) if paired else (Group.of(levels[0]), Group.of(levels[1]))


class Welch(NamedTuple):
    """A difference of two means, relative to the smaller magnitude of them."""

    difference: float
    """Test minus control."""
    error: float
    """Standard error of the difference, in the same unit."""
    degrees: float
    """Degrees of freedom by Welch and Satterthwaite; at least those of the smaller group alone, and
    at most twice as many."""


def welch(test: Group, control: Group) -> Welch:
    """Compare two groups.

    The magnitude that the difference is relative to is taken as known: its own error is a
    difference of second order, since spreads are a few percent of the loss.
    """
    scale = max(min(abs(test.mean), abs(control.mean)), np.finfo(np.float64).tiny)
    shares = [group.variance / group.seeds for group in (test, control)]
    error = math.sqrt(sum(shares)) / scale
    return Welch((test.mean - control.mean) / scale, error, _degrees(test, control))


def _degrees(test: Group, control: Group) -> float:
    shares = [group.variance / group.seeds for group in (test, control)]
    largest = max(shares)
    least = float(min(test.seeds, control.seeds) - 1)
    if not largest > 0:
        return least
    # Divided by the largest first: squares of tiny variances are 0.
    parts = [share / largest for share in shares]
    below = sum(
        part**2 / (group.seeds - 1) for part, group in zip(parts, (test, control), strict=True)
    )
    # If a small group has little spread by chance, the larger one dominates, whose degrees of
    # freedom do not fit the small one's error: with 3 seeds against 10, 8% of correct pairs had a
    # block that was called different, where 5% may. Groups of one size never have more than this.
    return min(max(sum(parts) ** 2 / below, least), 2 * least)


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """Answer on the level of two groups; differences are relative."""

    outcome: Answer
    difference: float
    half_width: float
    """Of the interval around the difference at confidence ``1 - 2 alpha``."""
    degrees: float
    """Of freedom."""
    one_sided: bool = False
    """Whether the question was only if it is higher by more than the margin."""
    further_seeds: int | None = None
    """How many more seeds a side would settle the question with a probability of :data:`CHANCE`, if
    the difference stays as it is; None when settled or not foreseeable."""
    lengthened: float | None = None
    """How many times as long every run has to be for the same, with the seeds that there are; None
    where no length is enough, because the seeds themselves differ."""

    @property
    def bound(self) -> float:
        """Upper bound of the difference."""
        size = self.difference if self.one_sided else abs(self.difference)
        return size + self.half_width


def over_seeds(
    test: Group,
    control: Group,
    margin: float,
    *,
    one_sided: bool = False,
    alarm: float = ALPHA,
    rounding: float = 0.0,
    noise: tuple[float, float] = (0.0, 0.0),
) -> OverSeeds:
    """Test whether the level of one group is the other's within ``± margin``, relative.

    ``one_sided`` asks whether it is no higher than that: any lower level is fine. ``alarm`` is the
    significance level of a difference beyond the margin; equivalence is tested at
    :data:`converge_harness.judge.compare.tost.ALPHA`. ``rounding`` is the rounding of the sources,
    relative: it widens the interval. ``noise`` is the part of the variance of one seed's level that
    comes from its steps (:func:`step_noise`), of test and control: longer runs have less.

    Raises ValueError for fewer than :data:`FEWEST_SEEDS` a side or an invalid margin.
    """
    _refuse_unusable(test, control, margin)
    found = welch(test, control)
    size = found.difference if one_sided else abs(found.difference)
    width = _student(found.degrees, 1 - ALPHA) * found.error + rounding
    stricter = _student(found.degrees, 1 - alarm) * found.error + rounding
    if size + width <= margin:
        outcome = Answer.EQUIVALENT
    elif size - stricter > margin:
        outcome = Answer.DIFFERENT
    else:
        outcome = Answer.INCONCLUSIVE
    answer = OverSeeds(outcome, found.difference, width, found.degrees, one_sided)
    if outcome is not Answer.INCONCLUSIVE:
        return answer
    plan = _Plan(test, control, margin, alarm, rounding, noise, one_sided)
    return OverSeeds(
        outcome,
        found.difference,
        width,
        found.degrees,
        one_sided,
        further_seeds=plan.seeds(),
        lengthened=plan.length(),
    )


def step_noise(values: Floats) -> float:
    """Variance of one seed's mean that comes from the noise of its steps.

    ``values`` has shape (seeds, steps). The mean curve of all seeds is subtracted first; that
    subtracts a share of each seed's own noise, which ``seeds / (seeds - 1)`` corrects. 0 for
    windows that are too short for an estimate.
    """
    seeds, steps = values.shape
    if steps < FEWEST or seeds < FEWEST_SEEDS:
        return 0.0
    off = values - values.mean(axis=0)
    variance = float(np.mean([mean_error(one) ** 2 for one in off]))
    return variance * float(seeds / (seeds - 1))


# --------------------------------------------------------------- trajectory


class Block(NamedTuple):
    """A part of the run."""

    first: int
    """Index of its first step."""
    last: int
    """Index of its last step."""


def blocks(steps: int) -> tuple[Block, ...]:
    """A run of so many steps in up to :data:`BLOCKS` parts of nearly equal length."""
    count = max(min(BLOCKS, steps // 2), 1)
    parts = np.array_split(np.arange(steps), count) if steps else []
    return tuple(Block(int(part[0]), int(part[-1])) for part in parts)


class BlockDifference(NamedTuple):
    """One block of two groups."""

    block: Block
    difference: float
    """Difference of the means, relative; test minus control."""
    excess: float
    """Lower bound of the difference: above the margin, the block is different."""


def trajectory(
    test: Floats,
    control: Floats,
    *,
    paired: bool = False,
    alarm: float = ALPHA,
    rounding: float = 0.0,
) -> tuple[BlockDifference, ...]:
    """Compare two groups block by block.

    ``test`` and ``control`` have shapes (seeds, steps) with the same steps; ``paired`` says that a
    row of both is one seed. ``alarm`` is the probability that any block is called different
    although the groups are within the margin: each block gets its share. ``rounding`` is the
    rounding of the sources, relative.
    """
    parts = blocks(int(test.shape[1]))
    found = []
    for part in parts:
        window = slice(part.first, part.last + 1)
        compared = welch(*groups_of(test[:, window], control[:, window], paired=paired))
        # At the margin's edge only one side can exceed it, so a side takes the block's whole share.
        width = _student(compared.degrees, 1 - alarm / len(parts)) * compared.error + rounding
        found.append(BlockDifference(part, compared.difference, abs(compared.difference) - width))
    return tuple(found)


# --------------------------------------------------------------------- plan


class _Plan(NamedTuple):
    """What would settle an open question, if the difference stays as it is."""

    test: Group
    control: Group
    margin: float
    alarm: float
    rounding: float
    noise: tuple[float, float]
    one_sided: bool

    def seeds(self) -> int | None:
        """Further seeds a side."""

        def settled(more: int) -> bool:
            return self._settled([group.variance for group in self._groups], more)

        if not settled(MOST_SEEDS):
            return None
        return max(bisect_left(range(MOST_SEEDS), 1, key=settled), 1)

    def length(self) -> float | None:
        """Multiple of the present length; None where no length is enough."""
        fixed = [
            max(group.variance - noise, 0.0)
            for group, noise in zip(self._groups, self.noise, strict=True)
        ]

        def settled(times: float) -> bool:
            variances = [
                part + min(noise, group.variance) / times
                for part, noise, group in zip(fixed, self.noise, self._groups, strict=True)
            ]
            return self._settled(variances, 0)

        if not settled(LONGEST):
            return None
        low, most = 1.0, 2.0
        while not settled(most):
            low, most = most, 2 * most
        for _ in range(_HALVINGS):
            middle = (low + most) / 2
            low, most = (low, middle) if settled(middle) else (middle, most)
        return most

    @property
    def _groups(self) -> Sequence[Group]:
        return (self.test, self.control)

    def _settled(self, variances: Sequence[float], more: int) -> bool:
        """Whether so many more seeds of these variances settle it with a probability of CHANCE."""
        found = welch(self.test, self.control)
        size = found.difference if self.one_sided else abs(found.difference)
        # Where noise exceeds the margin, the difference shows nothing: the plan assumes none.
        drowned = found.error >= self.margin
        inside = drowned or size <= self.margin
        room = (self.margin if drowned else abs(self.margin - size)) - self.rounding
        if room <= 0 or (room < found.error and not drowned):
            return False
        level = ALPHA if inside else self.alarm
        # Equivalence can fail on two sides.
        power = (1 + CHANCE) / 2 if inside and not self.one_sided else CHANCE
        groups = [
            Group(group.seeds + more, group.mean, variance * self._wider)
            for group, variance in zip(self._groups, variances, strict=True)
        ]
        planned = welch(groups[0], groups[1])
        quantiles = _student(planned.degrees, 1 - level) + _student(planned.degrees, power)
        return planned.error * quantiles <= room

    @property
    def _wider(self) -> float:
        """The upper confidence limit of a variance over its estimate (chi-squared)."""
        degrees = welch(self.test, self.control).degrees
        return float(degrees / special.chdtri(degrees, _CONFIDENCE))


def _student(degrees: float, probability: float) -> float:
    return float(special.stdtrit(degrees, probability))


def _refuse_unusable(test: Group, control: Group, margin: float) -> None:
    for name, group in (("test", test), ("control", control)):
        if group.seeds < FEWEST_SEEDS:
            raise ValueError(
                f"{name} has {group.seeds} seeds: at least {FEWEST_SEEDS} show a spread"
            )
        if not (math.isfinite(group.mean) and math.isfinite(group.variance)):
            raise ValueError(f"{name} has a mean of {group.mean}: levels must be finite")
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin is {margin}: it must be finite and above 0")
