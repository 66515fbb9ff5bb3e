"""Two one-sided tests: whether the mean of a difference is small against a margin.

Equivalence has to be shown by the data: Schuirmann 1987, "A comparison of the two one-sided tests
procedure and the power approach for assessing the equivalence of average bioavailability".

* **Standard error**: differences of neighbouring steps are correlated, so a plain standard
  error would be too small. Lazarus, Lewis, Stock and Watson (2018, "HAR inference:
  recommendations for practice", J. Bus. Econ. Stat. 36) recommend the equal-weighted cosine
  estimator with ``0.4 T^(2/3)`` cosines and Student's t with as many degrees of freedom: no
  bandwidth to choose and nearly the stated error rate.
* **Drift**: where the difference grows, the mean over the window understates the final difference.
  So the level at the window's end, on the least-squares line, is tested as well, and the answer is
  *equivalent* only if both are within the margin. A test of two conditions that must both hold
  needs no correction (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling");
  the answer *different*, for which one of them is enough, halves its level (Bonferroni). A drift
  also raises the estimated variance, which is conservative.

What the error rates really are is measured in ``docs/operating-characteristics.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import fft, special

from converge_harness.model import Floats

FEWEST = 8
"""Shortest window that can be tested, in steps."""

LONGEST = 2**40
"""Nobody trains for more steps: a plan that needs more is not given."""

ALPHA = 0.05
"""Level of each one-sided test, as in bioequivalence."""

CHANCE = 0.8
"""Further steps are planned to settle the question with this probability, the usual power."""

_FEWEST_COSINES = 2
"""A single one would give Student's t one degree of freedom, and useless intervals."""


def level_of_look(share: float, before: float, alpha: float = ALPHA) -> float:
    """The level of a test at a planned look, of ``alpha`` for all looks together.

    ``share`` is how much of the run has been trained at this look, in (0, 1], and ``before`` at the
    look before it (0 for the first). Early looks get little, so that the last test is nearly as
    sharp as one without any look: the spending function of Lan and DeMets 1983 ("Discrete
    sequential boundaries for clinical trials") that is like O'Brien and Fleming's. Each look gets
    what the function grows by since the one before it; their sum holds whatever the correlation of
    the looks (Bonferroni).
    """

    def spent(share: float) -> float:
        if not 0 < share < 1:
            return 0.0 if share <= 0 else alpha
        return float(2 * special.ndtr(special.ndtri(alpha / 2) / math.sqrt(share)))

    return spent(share) - spent(before)


class Answer(StrEnum):
    """Answer of a test of equivalence; in a one-sided test, *different* means higher."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Outcome of a test of equivalence; differences in the unit of the input."""

    outcome: Answer
    mean: float
    """Mean difference over the window."""
    half_width: float
    """Of the interval around the mean at confidence ``1 - 2 alpha``; infinite for few steps."""
    end: float
    """Level of the least-squares line at the last step."""
    end_half_width: float
    steps: int
    """Length of the window."""
    further_steps: int | None = None
    """How many more steps the window needs to settle the question with a probability of about
    :data:`CHANCE`, if the difference goes on as it is; None when settled or not foreseeable."""
    one_sided: bool = False
    """Whether the question was only if it is higher by more than the margin."""

    @property
    def bound(self) -> float:
        """Upper bound of the difference, of the mean and at the end: equivalent within it."""
        mean, end = (_size(level, self.one_sided) for level in (self.mean, self.end))
        return max(mean + self.half_width, end + self.end_half_width)


def equivalence(
    difference: Floats,
    margin: float,
    alpha: float = ALPHA,
    *,
    rounding: float = 0.0,
    one_sided: bool = False,
) -> Equivalence:
    """Test whether the mean of a series, and its level at the end, lie within ``± margin``.

    ``difference`` has shape (steps,): paired differences of consecutive steps. ``rounding`` is the
    source's rounding of each of them: it widens the intervals, because a rounding that is the same
    at every step does not average out. A series without any variance (two bit-identical
    runs, say) has an interval of no width. Fewer than :data:`FEWEST` steps are inconclusive.
    ``one_sided`` asks for the upper limit alone (a test of non-inferiority: Wellek 2010, "Testing
    statistical hypotheses of equivalence and noninferiority", chapter 2): anything lower is fine.

    Raises ValueError for differences that are not finite, and for an invalid margin or level.
    """
    _refuse_unusable(difference, margin, alpha)
    steps = int(difference.size)
    if steps < FEWEST:
        mean = float(difference.mean()) if steps else 0.0
        return Equivalence(
            Answer.INCONCLUSIVE, mean, math.inf, mean, math.inf, steps, FEWEST - steps, one_sided
        )
    levels = _levels(difference)
    quantile, stricter = (_student(steps, 1 - level) for level in (alpha, alpha / 2))
    widths = [quantile * error + rounding for _, error in levels]
    sized = [(_size(level, one_sided), error) for level, error in levels]
    if all(size + width <= margin for (size, _), width in zip(sized, widths, strict=True)):
        outcome = Answer.EQUIVALENT
    elif any(size - stricter * error - rounding > margin for size, error in sized):
        outcome = Answer.DIFFERENT
    else:
        outcome = Answer.INCONCLUSIVE
    undecided = outcome is Answer.INCONCLUSIVE
    return Equivalence(
        outcome=outcome,
        mean=levels[0][0],
        half_width=widths[0],
        end=levels[1][0],
        end_half_width=widths[1],
        steps=steps,
        further_steps=_further(sized, steps, margin, alpha, rounding) if undecided else None,
        one_sided=one_sided,
    )


def mean_error(series: Floats) -> float:
    """Standard error of the mean of consecutive steps, which are correlated.

    ``series`` has shape (steps,), of at least :data:`FEWEST`; the estimator is this module's.
    """
    return _levels(series)[0][1]


def end_level(series: Floats) -> float:
    """Level of the least-squares line at the last step; ``series`` has shape (steps,), not 0."""
    return _levels(series)[1][0]


def _size(level: float, one_sided: bool) -> float:  # noqa: FBT001 (passed on as it came)
    """What is compared with the margin: the sign of a level only matters in a one-sided test."""
    return level if one_sided else abs(level)


def _refuse_unusable(difference: Floats, margin: float, alpha: float) -> None:
    finite = np.isfinite(difference)
    if not finite.all():
        index = int(np.argmin(finite))
        raise ValueError(f"difference {index} is {difference[index]}: all must be finite")
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin is {margin}: it must be finite and above 0")
    if not 0 < alpha < 0.5:  # noqa: PLR2004 (the sentence says it)
        raise ValueError(f"alpha is {alpha}: it must lie between 0 and 0.5")


def _cosines(steps: int) -> int:
    """Cosines of the variance estimate, hence degrees of freedom (Lazarus et al. 2018)."""
    return max(_FEWEST_COSINES, round(0.4 * math.pow(steps, 2 / 3)))


def _student(steps: int, probability: float) -> float:
    """Quantile of Student's t for a window of so many steps."""
    return float(special.stdtrit(_cosines(steps), probability))


def _levels(difference: Floats) -> tuple[tuple[float, float], tuple[float, float]]:
    """Mean and level at the end, each with its standard error.

    The long-run variance is the mean square of the first cosine coefficients (orthonormal type-II
    DCT). The line's slope is orthogonal to the mean, so the end level's variance is their sum.
    """
    steps = difference.size
    mean = float(difference.mean())
    centred = difference - mean
    if not np.any(difference != difference[0]):
        return (float(difference[0]), 0.0), (float(difference[0]), 0.0)
    coefficients = fft.dct(centred, norm="ortho")[1 : _cosines(steps) + 1]
    with np.errstate(over="ignore"):  # an interval that overflows decides nothing
        error = math.sqrt(float(np.mean(coefficients**2)) / steps)
    time = np.linspace(-1.0, 1.0, steps)
    spread = float(np.mean(time**2))
    slope = float(np.mean(centred * time)) / spread
    return (mean, error), (mean + slope, error * math.sqrt(1 + 1 / spread))


def _further(
    levels: Sequence[tuple[float, float]],
    steps: int,
    margin: float,
    alpha: float,
    rounding: float,
) -> int | None:
    """Further steps of the window until the question is settled, if nothing changes.

    ``levels`` are sizes (:func:`_size`) with their standard errors. Equivalence needs both
    conditions; outside of the margin, one is enough.
    """
    outside = [(level, error) for level, error in levels if level > margin]
    needed = [
        _enough(level, error, steps, margin, alpha / 2 if outside else alpha, rounding)
        for level, error in outside or levels
    ]
    known = [count for count in needed if count is not None]
    if not known or (len(known) < len(needed) and not outside):
        return None
    return max((min if outside else max)(known) - steps, 1)


def _enough(
    level: float, error: float, steps: int, margin: float, alpha: float, rounding: float
) -> int | None:
    """Length of the window at which one level is settled with a probability of :data:`CHANCE`.

    The standard error shrinks as ``1 / sqrt(T)``. It has to become smaller than the level's
    distance from the margin, unless noise exceeds the margin: then the level shows nothing yet, and
    the plan assumes no difference. None where the level is within its noise of the margin, or the
    noise overflows.
    """
    if not math.isfinite(error):
        return None
    drowned = error >= margin
    room = (margin if drowned else abs(margin - level)) - rounding
    if room <= 0 or (room < error and not drowned):
        return None

    def settled(count: int) -> bool:
        quantiles = _student(count, 1 - alpha) + _student(count, (1 + CHANCE) / 2)
        return count >= steps * (error * quantiles / room) ** 2

    most = steps
    while not settled(most):
        most *= 2
        if most > LONGEST:
            return None
    return bisect_left(range(most), 1, lo=steps, key=settled)
