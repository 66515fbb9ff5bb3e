"""How much a run's random numbers move its gradients, and whether that can be judged.

After its frozen steps a run repeats the first batch. Only random numbers (dropout, stochastic
rounding) make the two passes differ, by as much as they move each gradient. A test set may draw
other numbers than its control and be correct; they then widen its limits
(:mod:`converge_harness.judge.compare.precision_errors`). So their effect is checked first: it has
to be more than rounding, bounded, and as large as in the control, if that draws any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from converge_harness.judge.compare.floors import GRADIENT_FLOORS
from converge_harness.judge.compare.limits import normal, student
from converge_harness.judge.soundness import Flaw
from converge_harness.model import FEWEST_DRAWN, Evidence, Floats, Precision

SPREAD = 0.15
"""Standard deviation of the logarithm of the random numbers' effect on a gradient, relative to the
effect in the two passes: one pair of passes, estimated from two sketches, stands for all batches.
Measured over the 39 parameters of a set: at most 0.14, the largest of all 1.3 times the effect in
the passes (dropout of 0.1 in fp32: TP 2, HSDP 2x2, accumulation by 2, one device)."""
RATIO_SPREAD, MEAN_RATIO_SPREAD = 0.16, 0.06
"""Standard deviation of the logarithm of the random numbers' effect on a gradient, relative to the
control's: of one parameter, and of the mean over all. Measured at most 0.16 and 0.058 (the same
sets, and those in bf16 mixed)."""
FLOAT32_ROUNDING = GRADIENT_FLOORS[Precision.FP32].first
"""Relative error of a gradient that computes in float32."""
DRAWS_BEYOND = 3.0
"""A run draws if some gradient moves by more than this many times rounding."""
MOST = 0.5
"""Share of a gradient's norm: one that moves by more differs by more than random numbers."""
OUTLIER = 12.0
"""By how many spreads a single batch of 16 may be off: the spread is from their median absolute
deviation, and of normal numbers one set in 10,000 has one further off than 11.7 (simulated with
400,000 sets; with 8 numbers 28, which ``_FEWER`` accounts for)."""
_FEWER = 1.3
_OF_NORMAL = 1.4826
"""Standard deviation of a normal number, in median absolute deviations."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """How much random numbers move every gradient, relative to its norm; shapes (parameters,)."""

    test: Floats
    matched: Floats
    reference: Floats

    @property
    def variance(self) -> Floats:
        """Of the relative difference of one batch's gradients to the reference's."""
        return np.asarray(self.test**2 + self.reference**2, dtype=np.float64)

    @property
    def longer(self) -> Floats:
        """Logarithm of how much larger random numbers make norms than the matched control's.

        They have no direction, and add to every norm.
        """
        return _length(self.test) - _length(self.matched)

    @property
    def uncertainty(self) -> Floats:
        """Standard deviation of ``longer``: proportional to the squared effect in the passes."""
        return 2 * SPREAD * np.hypot(_length(self.test), _length(self.matched))


def drawn(run: Evidence) -> Floats | None:
    """Shape (parameters,): distance of two passes over the first batch, over sqrt(2).

    Relative to the norm of both, so at most sqrt(2); NaN where a pass was not finite. All 0 for a
    run that draws nothing; None where no second pass was made.
    """
    samples = run.frozen
    if samples is None or samples.again is None or not len(samples.sketch):
        return None
    first = samples.sketch[0]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        distance = np.sum((samples.again - first) ** 2, axis=-1)
        size = np.sum(samples.again**2, axis=-1) + np.sum(first**2, axis=-1)
        return np.asarray(np.sqrt(np.where(distance == 0, 0.0, distance / size)), dtype=np.float64)


def in_force(moved: Floats, rounding: Floats) -> bool:
    """Whether a run draws: it moves some gradient by more than rounding does."""
    return bool(np.any(moved > DRAWS_BEYOND * np.maximum(rounding, FLOAT32_ROUNDING)))


def drawing_of(
    test: Evidence, matched: Evidence, reference: Evidence, rounding: Floats
) -> Drawing | Flaw:
    """The effect of random numbers in the runs, or why a set with its own cannot be judged.

    ``rounding`` has the matched control's relative error of every gradient.
    """
    if test.frozen_steps < FEWEST_DRAWN:
        return Flaw(
            f"own_random_numbers needs {FEWEST_DRAWN} frozen steps or more, there are "
            f"{test.frozen_steps}: set frozen under [probe]"
        )
    found = []
    for run in (test, matched, reference):
        moved = drawn(run)
        if moved is None:
            return Flaw(
                f"{run.name} made no second pass over its first frozen batch, as runs of an older "
                "converge: run it again with --fresh, or bless its baseline again"
            )
        beyond = np.flatnonzero(~(moved <= MOST))
        if beyond.size and run.frozen is not None:
            name = run.frozen.names[int(beyond[0])]
            return Flaw(
                f"two passes of {run.name} over one batch move the gradient of {name} by "
                f"{moved[beyond[0]]:.2g} of its norm, and up to {MOST:g} can be random numbers: "
                'ask = "no worse" compares only losses'
            )
        found.append(moved)
    if not in_force(found[0], rounding):
        return Flaw(
            f"own_random_numbers is named but not in force: two passes of {test.name} over one "
            "batch at the same weights differ by no more than rounding (an optimizer that rounds "
            "stochastically draws only in its updates, and does not need this key)"
        )
    return Drawing(*found)


def furthest(values: Floats) -> float:
    """How far the most extreme batch is from the median."""
    return float(np.abs(values - np.median(values)).max())


def by_chance(values: Floats) -> float:
    """How far a single batch may be from the median, whatever the most extreme one is."""
    spread = _OF_NORMAL * float(np.median(np.abs(values - np.median(values))))
    return float(OUTLIER * max(1.0, 16 / len(values)) ** _FEWER * spread)


def mean_by_chance(values: Floats, alarms: float) -> float:
    """How far a mean over batches is from 0 by chance with this probability, by Student's t."""
    t = float(student(np.array(alarms), len(values) - 1))
    return t * float(values.std(ddof=1)) / math.sqrt(len(values))


def unlike(drawing: Drawing, names: tuple[str, ...], alarms: float) -> Iterator[tuple[str, float]]:
    """Parameters whose gradients move more or less than in the control, with the factor.

    First, as "all parameters", the factor in the geometric mean, if that is off. ``alarms`` is the
    probability of a false alarm. Nothing where the control draws nothing.
    """
    ours, theirs = drawing.test, drawing.matched
    looked = (ours > FLOAT32_ROUNDING) | (theirs > FLOAT32_ROUNDING)
    if not np.any(theirs > FLOAT32_ROUNDING):
        return
    ratio = np.log(np.maximum(ours, FLOAT32_ROUNDING) / np.maximum(theirs, FLOAT32_ROUNDING))
    count, mean = int(np.count_nonzero(looked)), float(ratio[looked].mean())
    if not abs(mean) <= MEAN_RATIO_SPREAD * normal(alarms / 4):
        yield "all parameters", math.exp(mean)
    limit = RATIO_SPREAD * normal(alarms / count / 4)
    for index in np.flatnonzero(looked & ~(np.abs(ratio) <= limit)):
        yield names[int(index)], float(np.exp(ratio[index]))


def _length(moved: Floats) -> Floats:
    """Shape (parameters,): logarithm of how much larger random numbers make norms."""
    return np.asarray(-np.log1p(-(moved**2)) / 2, dtype=np.float64)
