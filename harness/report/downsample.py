"""Fewer points for drawing. Nothing is ever judged on a downsampled curve."""

from __future__ import annotations

import math

from harness.report.curves import Curve

DRAWN_POINTS = 3000
"""Points a drawn curve has at most: more cost browsers seconds and show nothing more."""


def downsample(curve: Curve, points: int = DRAWN_POINTS) -> Curve:
    """At most ``points`` points that draw the same line: least and greatest value per bucket.

    Peaks survive at their own steps, the first and last points stay, and a bucket that holds a
    non-finite value keeps its first one, so that a gap stays visible.

    Raises :class:`ValueError` when ``points`` leaves no bucket (fewer than 5).
    """
    least = 5
    if points < least:
        raise ValueError(f"cannot draw a curve with {points} points; at least {least} are needed")
    length = len(curve.steps)
    if length <= points:
        return curve
    buckets = (points - 2) // 3
    kept = {0, length - 1}
    for bucket in range(buckets):
        inside = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        finite = [index for index in inside if math.isfinite(curve.values[index])]
        if finite:
            kept.add(min(finite, key=curve.values.__getitem__))
            kept.add(max(finite, key=curve.values.__getitem__))
        if len(finite) < len(inside):
            kept.add(next(i for i in inside if not math.isfinite(curve.values[i])))
    order = sorted(kept)
    return Curve(
        tuple(curve.steps[index] for index in order), tuple(curve.values[index] for index in order)
    )


def corners(curve: Curve) -> Curve:
    """Only the points where a piecewise linear curve bends: limits are mostly straight."""
    steps, values = curve.steps, curve.values
    order = [
        index
        for index in range(len(steps))
        if index in (0, len(steps) - 1)
        or not values[index - 1] == values[index] == values[index + 1]
    ]
    return Curve(tuple(steps[index] for index in order), tuple(values[index] for index in order))
