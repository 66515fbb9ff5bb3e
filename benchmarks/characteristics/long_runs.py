"""Error rates of the equivalence tier alone: size, coverage and predicted run length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import signal

from characteristics.rates import Rate
from converge_harness.judge.compare.tost import Answer, Equivalence, equivalence
from converge_harness.model import Floats

MARGIN = 1e-3
SPREAD = 3e-4
"""Standard deviation of the noise: a third of the margin, so that long runs can decide."""
WINDOWS = (10, 50, 150, 1500)
CORRELATIONS = (0.0, 0.5, 0.8, 0.9, 0.95)
FREEDOM = 3.0
"""Student-t innovations with an infinite third moment."""


@dataclass(frozen=True, slots=True)
class LongRuns:
    """Answers of the test for one autocorrelation of the noise and one window length."""

    window: int
    correlation: float
    covered: Rate
    """The interval around the mean, nominally 90%, contains the true mean."""
    wrongly_equivalent: Rate
    """The true mean is the margin, and the answer is equivalent: should be at most 5%."""
    wrongly_different: Rate
    """The true mean is the margin, and the answer is different: should be at most 5%."""
    drift_equivalent: Rate
    """The difference grows from nothing to the margin, and the answer is equivalent."""
    equivalent: Rate
    """There is no true difference, and the answer is equivalent."""
    noisy_different: Rate
    """There is no true difference, the noise is three times the margin, and the answer is
    different: because of this the check also asks the repeats of the control.
    """
    settled: Rate
    """Inconclusive answers that predicted further steps, and were settled by these."""


def long_runs(repetitions: int, seed: int = 3) -> list[LongRuns]:
    return [
        _measure(window, correlation, repetitions, np.random.default_rng([seed, window, index]))
        for window in WINDOWS
        for index, correlation in enumerate(CORRELATIONS)
    ]


def noise(
    correlation: float, shape: tuple[int, int], chance: np.random.Generator, burn_in: int = 200
) -> Floats:
    """Shape (series, steps): AR(1) of unit variance with heavy-tailed innovations."""
    series, steps = shape
    shocks = chance.standard_t(FREEDOM, (series, burn_in + steps))
    shocks *= np.sqrt((1 - correlation**2) * (FREEDOM - 2) / FREEDOM)
    return np.asarray(
        signal.lfilter([1.0], [1.0, -correlation], shocks, axis=1)[:, burn_in:], dtype=np.float64
    )


def _measure(
    window: int, correlation: float, repetitions: int, chance: np.random.Generator
) -> LongRuns:
    noises = SPREAD * noise(correlation, (repetitions, window), chance)
    at_margin = [equivalence(MARGIN + one, MARGIN) for one in noises]
    drift = MARGIN * np.linspace(0.5, 1.0, window)  # second half of a drift from nothing
    drifting = [equivalence(drift + one, MARGIN) for one in noises]
    alike = [equivalence(one, MARGIN) for one in noises]
    return LongRuns(
        window,
        correlation,
        Rate(sum(abs(found.mean) <= found.half_width for found in alike), repetitions),
        _rate(at_margin, Answer.EQUIVALENT),
        _rate(at_margin, Answer.DIFFERENT),
        _rate(drifting, Answer.EQUIVALENT),
        _rate(alike, Answer.EQUIVALENT),
        _rate([equivalence(one, SPREAD / 3) for one in noises], Answer.DIFFERENT),
        _foresight(window, correlation, max(repetitions // 10, 20), chance),
    )


def _rate(found: list[Equivalence], answer: Answer) -> Rate:
    return Rate(sum(one.outcome is answer for one in found), len(found))


def _foresight(
    window: int, correlation: float, repetitions: int, chance: np.random.Generator
) -> Rate:
    """Continue by as many steps as the answer predicted, with noise as large as the margin."""
    longest = 20 * window
    settled = foreseen = 0
    for one in MARGIN * noise(correlation, (repetitions, longest), chance):
        further = equivalence(one[:window], MARGIN).further_steps
        if further is not None and window + further <= longest:
            foreseen += 1
            later = equivalence(one[: window + further], MARGIN)
            settled += later.outcome is not Answer.INCONCLUSIVE
    return Rate(settled, foreseen)
