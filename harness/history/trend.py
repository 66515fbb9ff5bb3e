"""A test set's deviations over the nights, their step changes, and what changed then. Pure.

A step change separates two levels, each of which lasts for two nights or more. A series is cut into
levels so that the total cost is minimal: each night costs the squared distance from its level in
units of the noise, but at most ``OUTLIER`` squared (the biweight loss of Fearnhead and Rigaill,
"Changepoint Detection in the Presence of Outliers", JASA 114, 2019), and each level has a fixed
price. With a price between one and two times the maximal cost of a night, a single outlier never
becomes a level of its own, and two far ones always do.

Their algorithm tracks the minimal cost as a piecewise function of the level. Here levels are taken
from a grid finer than the noise, and the same recursion is one array operation per night: exact on
the grid, and linear in the number of nights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy import special
from scipy.ndimage import median_filter

from converge_harness.history.query import Changed, Numbers, Series, SetNight, changed_between

DEVIATION = "relative"
"""Unit of the checks with a trend: relative differences. Seconds and counts have no trend."""
DEFINITION = "experiment file"
"""Pseudo-circumstance: the file now says something else about the set or its control."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """A deviation that changed its level, for two nights or more."""

    check: str
    last_before: SetNight
    """The last night on the old level; nights without a value may lie in between."""
    first_after: SetNight
    """The first night on the new level: for a step upwards, the first bad one."""
    before: float
    after: float
    """Median deviations of the levels, relative; may be 0 or infinity."""
    changed: tuple[Changed, ...]
    """What differs between the two nights."""

    @property
    def worse(self) -> bool:
        return self.after > self.before


@dataclass(frozen=True, slots=True)
class Trend:
    """One signal's deviations over the nights."""

    series: Series
    decades: Numbers
    """log10 of the deviation, one per night of the series, all finite: zero is placed one decade
    below the smallest other value, NaN and infinity one above the largest value and the limit.
    """
    steps: tuple[StepChange, ...]


def trends(nights: Sequence[SetNight], every: Iterable[Series]) -> tuple[Trend, ...]:
    """The trend of every deviation of a test set, except those that were always zero.

    Raises:
        KeyError: a series has a night that is not in ``nights``.
    """
    by_number = {night.number: night for night in nights}
    return tuple(
        _trend(by_number, series)
        for series in every
        if series.unit == DEVIATION and np.any(series.measured != 0)
    )


def what_changed(before: SetNight, after: SetNight) -> tuple[Changed, ...]:
    """Circumstances that differ between two nights of a test set, sorted by name."""
    changed = changed_between(before.circumstances, after.circumstances)
    if before.definition == after.definition:
        return changed
    return (Changed(DEFINITION, before.definition, after.definition), *changed)


def decades(measured: Numbers, limits: Numbers) -> Numbers:
    """log10 of deviations, with values for zero, NaN and infinity (see :class:`Trend`)."""
    size = np.abs(measured)
    usual = size[np.isfinite(size) & (size > 0)]
    known = np.concatenate([usual, limits[np.isfinite(limits) & (limits > 0)]])
    lowest = np.log10(usual.min() if usual.size else known.min() if known.size else 1.0) - 1
    highest = np.log10(known.max() if known.size else 1.0) + 1
    with np.errstate(divide="ignore"):
        heights = np.log10(size)
    heights[size == 0] = lowest
    heights[~np.isfinite(size)] = highest
    return heights


def _trend(nights: Mapping[int, SetNight], series: Series) -> Trend:
    heights = decades(series.measured, series.limits)
    # NaN counts as infinity, so that a level has a median.
    sizes = np.where(np.isnan(series.measured), np.inf, np.abs(series.measured))
    found = find_steps(heights)
    bounds = [0, *(step.at for step in found), sizes.size]
    middles = [float(np.median(sizes[start:end])) for start, end in pairwise(bounds)]
    steps = []
    for index, step in enumerate(found):
        last, first = (nights[int(series.nights[at])] for at in (step.at - 1, step.at))
        steps.append(
            StepChange(
                check=series.check,
                last_before=last,
                first_after=first,
                before=middles[index],
                after=middles[index + 1],
                changed=what_changed(last, first),
            )
        )
    return Trend(series, heights, tuple(steps))


OUTLIER = 4.0
"""In units of the noise: all nights further from their level than this cost the same."""
PRICE = 20.0
"""Price of a level, in squared units of the noise; between 1 and 2 times ``OUTLIER`` squared. On
simulated noise of several kinds, at most about one in 100 year-long series gets a false step
(``tests/history/test_step_changes.py``).
"""
SMALLEST_STEP = 0.1
"""Decades: a step by a factor below 1.26 is not reported, however certain it is."""
NOISE_FLOOR = 0.02
"""Decades (5%): least noise, because repeats on one machine may agree bit for bit."""
FEWEST = 5
"""With fewer nights noise and steps cannot be distinguished."""
_WINDOW = 31
"""Window in nights for the noise of the night in its middle."""
_GRID = 512


class LevelStep(NamedTuple):
    """From one level to the next."""

    at: int
    """Index of the first value on the new level."""
    before: float
    after: float
    """Medians of the two levels."""


def find_steps(values: Numbers) -> tuple[LevelStep, ...]:
    """The steps of a series of finite values, in order; none if there are fewer than ``FEWEST``.

    Values are log10 of deviations; nights may be missing between them.

    Raises:
        ValueError: a value is not finite.
    """
    if not np.all(np.isfinite(values)):
        raise ValueError("steps can be found in finite values only")
    if values.size < FEWEST:
        return ()
    noise = _noise(values)
    bounds = [0, *_cuts(values, noise), values.size]
    while True:
        levels = [float(np.median(values[start:end])) for start, end in pairwise(bounds)]
        heights = np.abs(np.diff(levels))
        if not heights.size or heights.min() >= SMALLEST_STEP:
            break
        del bounds[int(heights.argmin()) + 1]
    return tuple(
        LevelStep(at, before, after)
        for at, before, after in zip(bounds[1:-1], levels[:-1], levels[1:], strict=True)
    )


def _cuts(values: Numbers, noise: Numbers) -> list[int]:
    """Where the levels of minimal total cost begin, except the first."""
    grid = np.linspace(
        values.min(),
        values.max(),
        int(np.clip(np.ptp(values) / noise.min() * 4, 2, _GRID)),
    )
    cost = np.zeros(grid.size)
    """Minimal cost of the nights so far if the last of them is on this level."""
    begun = np.zeros(grid.size, dtype=np.intp)
    """The night at which that level began."""
    before = np.zeros(values.size, dtype=np.intp)
    """For a level that begins at this night: where the previous one began."""
    for night, value in enumerate(values):
        best = int(cost.argmin())
        anew = cost[best] + PRICE
        before[night] = begun[best]
        begun[cost > anew] = night
        np.minimum(cost, anew, out=cost)
        cost += np.minimum(((value - grid) / noise[night]) ** 2, OUTLIER**2)
    cuts: list[int] = []
    start = int(begun[cost.argmin()])
    while start > 0:
        cuts.append(start)
        start = int(before[start])
    return cuts[::-1]


def _noise(values: Numbers) -> Numbers:
    """Standard deviation of every night's noise, from differences of neighbouring nights.

    Their median is robust to steps and outliers. The result is at least that of the whole series,
    and at least the floor.
    """
    apart = np.abs(np.diff(values))
    to_deviation = 1 / (special.ndtri(0.75) * np.sqrt(2))
    around = median_filter(apart, size=min(_WINDOW, apart.size), mode="nearest")
    # By chance the median of few differences is often far too small.
    few = 1 + 4 / values.size
    whole = max(NOISE_FLOOR, few * to_deviation * float(np.median(apart)))
    noise: Numbers = np.maximum(whole, to_deviation * np.append(around, around[-1]))
    return noise
