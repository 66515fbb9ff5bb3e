"""Error rates of runs that may end once it is settled whether their loss is equivalent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np

from characteristics.long_runs import CORRELATIONS, MARGIN, noise
from characteristics.rates import Rate
from converge_harness.judge import level_of_look
from converge_harness.judge.compare.curves import pair, signed_difference
from converge_harness.judge.compare.tost import Answer, equivalence
from converge_harness.model import Evidence, Floats, settling_steps

STEPS = 3000
"""Those of the runs in torchtitan's converging guide …"""
WARMUP = 600
"""… and of their warm-up, which moves the first looks."""
SPREADS = (0.3, 1.0, 3.0)
"""Standard deviations of the difference of a step, in margins."""
BEYOND = 1.5
"""A difference that should be found, in margins."""
LATE = 0.6
"""Share of the run after which a late error begins."""


@dataclass(frozen=True, slots=True)
class SettledEarly:
    """Answers of all looks together, for one autocorrelation and one size of the noise."""

    spread: float
    correlation: float
    wrongly_equivalent: Rate
    """The true mean is the margin, and a look answers equivalent: should be at most 5%."""
    wrongly_different: Rate
    """The true mean is the margin, and the answer is different: should be at most 5%."""
    different_early: Rate
    """The same if early looks could answer different, too: why they cannot."""
    equivalent: Rate
    """There is no true difference, and the answer is equivalent …"""
    at_the_end: Rate
    """… and by a single test at the end of the run, without looks."""
    trained: float
    """Mean share of the run that is trained where there is no true difference."""
    different: Rate
    """The true mean is :data:`BEYOND` margins, and the answer is different."""
    growing_missed: Rate
    """The difference grows evenly from nothing to two margins at the end of the run, so that the
    half tested there is 1.5 margins off, and the answer is equivalent."""
    late_missed: Rate
    """A difference of two margins begins at :data:`LATE`, after the last early look, and the answer
    is equivalent."""


_ANSWERS = (Answer.EQUIVALENT, Answer.DIFFERENT)


class _Answered(NamedTuple):
    answer: Answer
    share: float
    """How much of the run was trained for it."""


def settled_early(repetitions: int, seed: int = 5) -> list[SettledEarly]:
    return [
        _measure(spread, correlation, repetitions, np.random.default_rng([seed, row, column]))
        for row, spread in enumerate(SPREADS)
        for column, correlation in enumerate(CORRELATIONS)
    ]


@dataclass(frozen=True, slots=True)
class SettledReally:
    """Answers for pairs of real runs of one control."""

    runs: int
    steps: int
    spread: float
    """Standard deviation of the difference of a step past the warm-up, in margins."""
    correlation: float
    """Of these differences at neighbouring steps."""
    apart: float
    """Standard deviation of a pair's mean difference past the warm-up, in margins: two runs of one
    control that differ in rounding train to slightly different ends."""
    equivalent: Rate
    """Pairs whose answer is equivalent …"""
    early: Rate
    """… and before the end of the run."""
    trained: float
    """Mean share of the run that is trained."""
    wrongly_equivalent: Rate
    """The mean difference past the warm-up is made one margin, of either sign, and the answer is
    equivalent."""
    different: Rate
    """The same with :data:`BEYOND` margins, and the answer is different."""


def settled_really(runs: Sequence[Evidence]) -> SettledReally:
    """Judge real repeats of one control of :data:`STEPS` steps against each other.

    Raises ValueError for runs of another length. Pairs share runs, but the intervals of the rates
    treat them as independent.
    """
    if lengths := {run.steps.size for run in runs} - {STEPS}:
        raise ValueError(f"runs of {sorted(lengths)} steps: looks are planned for {STEPS}")
    differences = np.array(
        [signed_difference(pair(*two, "loss_recomputed")) for two in combinations(runs, 2)]
    )
    past = differences[:, WARMUP:]
    centred = differences - past.mean(axis=1, keepdims=True)
    signed = [sign * one for one in centred for sign in (1.0, -1.0)]
    alike = [_answer(one) for one in differences]
    return SettledReally(
        len(runs),
        STEPS,
        float(past.std(axis=1).mean()) / MARGIN,
        float(np.mean([np.corrcoef(one[1:], one[:-1])[0, 1] for one in past])),
        float(np.sqrt(np.mean(past.mean(axis=1) ** 2))) / MARGIN,
        _rate([each.answer for each in alike], Answer.EQUIVALENT),
        Rate(sum(each.share < 1.0 for each in alike), len(alike)),
        fmean(each.share for each in alike),
        _rate([_answer(MARGIN + one).answer for one in signed], Answer.EQUIVALENT),
        _rate([_answer(BEYOND * MARGIN + one).answer for one in signed], Answer.DIFFERENT),
    )


def _measure(
    spread: float, correlation: float, repetitions: int, chance: np.random.Generator
) -> SettledEarly:
    noises = spread * MARGIN * noise(correlation, (repetitions, STEPS), chance)
    late = np.where(np.arange(STEPS) < LATE * STEPS, 0.0, 2 * MARGIN)
    growing = 2 * MARGIN * np.linspace(0.0, 1.0, STEPS)
    alike = [_answer(one) for one in noises]
    at_margin = [_answer(MARGIN + one) for one in noises]
    whole = [equivalence(one[STEPS // 2 :], MARGIN).outcome for one in noises]
    return SettledEarly(
        spread,
        correlation,
        _rate([each.answer for each in at_margin], Answer.EQUIVALENT),
        _rate([each.answer for each in at_margin], Answer.DIFFERENT),
        _rate([_answer(MARGIN + one, _ANSWERS).answer for one in noises], Answer.DIFFERENT),
        _rate([each.answer for each in alike], Answer.EQUIVALENT),
        _rate(whole, Answer.EQUIVALENT),
        fmean(each.share for each in alike),
        _rate([_answer(BEYOND * MARGIN + one).answer for one in noises], Answer.DIFFERENT),
        _rate([_answer(growing + one).answer for one in noises], Answer.EQUIVALENT),
        _rate([_answer(late + one).answer for one in noises], Answer.EQUIVALENT),
    )


def _answer(difference: Floats, early: Collection[Answer] = (Answer.EQUIVALENT,)) -> _Answered:
    """That of the first look which may give it (one of ``early``), or of the end of the run."""
    before = 0.0
    for step in (*settling_steps(STEPS, WARMUP), STEPS):
        share = step / STEPS
        level = level_of_look(share, before)
        before = share
        found = equivalence(difference[step // 2 : step], MARGIN, level).outcome
        if found in early:
            break
    return _Answered(found, share)


def _rate(answers: list[Answer], answer: Answer) -> Rate:
    return Rate(sum(one is answer for one in answers), len(answers))
