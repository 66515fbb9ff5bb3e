"""What became of a test set's deviations over the nights, and what changed when they did; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from harness.history.query import Changed, Numbers, Series, SetNight, changed_between
from harness.history.steps import find_steps

DEVIATION = "relative"
"""Unit of the checks that have a trend: relative differences. Seconds and counts have none."""
DEFINITION = "experiment file"
"""Stands for a circumstance: the file asks for something else of the set or its control."""


@dataclass(frozen=True, slots=True)
class StepChange:
    """A deviation that went to another level, and stayed there for two nights or more."""

    check: str
    last_before: SetNight
    """The last night on the old level; nights without a value may lie in between."""
    first_after: SetNight
    """The first night on the new level: for a step upwards, the first bad one."""
    before: float
    after: float
    """Deviations in the middle of the levels, relative; 0 and infinity too."""
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
    """log10 of the deviation, one per night of the series, all finite: zero counts as one decade
    below the smallest other, what is not finite as one above the largest and the limit."""
    steps: tuple[StepChange, ...]


def trends(nights: Sequence[SetNight], every: Iterable[Series]) -> tuple[Trend, ...]:
    """The trend of every deviation of a test set; of those that were always zero, none.

    Raises:
        KeyError: a series has a night that is not among ``nights``.
    """
    by_number = {night.number: night for night in nights}
    return tuple(
        _trend(by_number, series)
        for series in every
        if series.unit == DEVIATION and np.any(series.measured != 0)
    )


def what_changed(before: SetNight, after: SetNight) -> tuple[Changed, ...]:
    """Circumstances that differ between two nights of a test set, in the order of their names."""
    changed = changed_between(before.circumstances, after.circumstances)
    if before.definition == after.definition:
        return changed
    return (Changed(DEFINITION, before.definition, after.definition), *changed)


def decades(measured: Numbers, limits: Numbers) -> Numbers:
    """log10 of deviations, with a place for zero and for what is not finite (:class:`Trend`)."""
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
    # NaN counts as endless, so that a level has a middle.
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
