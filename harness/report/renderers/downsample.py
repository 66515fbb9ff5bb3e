"""Fewer points for drawing. Nothing is ever judged on a downsampled curve."""

from __future__ import annotations

import numpy as np

from converge_harness.model import Flags, Integers
from converge_harness.report.view.curves import Curve

DRAWN_POINTS = 3000
"""Largest number of points of a drawn curve: more cost browsers seconds and show nothing more."""


def downsample(curve: Curve, points: int = DRAWN_POINTS) -> Curve:
    """At most ``points`` points that draw the same line: least and greatest value per bucket.

    Peaks survive at their own steps, the first and last points stay, and a bucket that holds a
    non-finite value keeps its first one, so that a gap stays visible.

    Raises :class:`ValueError` when ``points`` leaves no bucket (fewer than 5).
    """
    least = 5
    if points < least:
        raise ValueError(f"cannot draw a curve with {points} points; at least {least} are needed")
    length = len(curve)
    if length <= points:
        return curve
    buckets = (points - 2) // 3
    edges = np.arange(buckets + 1) * length // buckets
    sizes, values = np.diff(edges), curve.values
    bucket = np.repeat(np.arange(buckets), sizes)
    finite = np.isfinite(values)
    lowest = np.minimum.reduceat(np.where(finite, values, np.inf), edges[:-1])
    highest = np.maximum.reduceat(np.where(finite, values, -np.inf), edges[:-1])
    kept = np.unique(
        np.concatenate(
            [
                [0, length - 1],
                _first_of_each(bucket, finite & (values == np.repeat(lowest, sizes))),
                _first_of_each(bucket, finite & (values == np.repeat(highest, sizes))),
                _first_of_each(bucket, ~finite),
            ]
        )
    )
    return Curve(curve.steps[kept], values[kept])


def sizes(curve: Curve, points: int) -> Curve:
    """The largest absolute value of each of so many buckets of steps, at the bucket's last step.

    A bucket without a finite value is NaN. A curve of at most so many points keeps its steps.
    """
    buckets = min(points, len(curve))
    if not buckets:
        return curve
    edges = np.arange(buckets + 1) * len(curve) // buckets
    size = np.where(np.isfinite(curve.values), np.abs(curve.values), -np.inf)
    largest = np.maximum.reduceat(size, edges[:-1])
    return Curve(curve.steps[edges[1:] - 1], np.where(np.isfinite(largest), largest, np.nan))


def corners(curve: Curve) -> Curve:
    """Only the points where a piecewise linear curve bends: limits are mostly straight."""
    values = curve.values
    bends = np.ones(len(curve), dtype=np.bool_)
    bends[1:-1] = ~((values[:-2] == values[1:-1]) & (values[1:-1] == values[2:]))
    return Curve(curve.steps[bends], values[bends])


def _first_of_each(bucket: Integers, chosen: Flags) -> Integers:
    """Index of the first chosen point of every bucket that has one."""
    where = np.flatnonzero(chosen)
    _, first = np.unique(bucket[where], return_index=True)
    return where[first]
