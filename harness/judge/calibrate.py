"""A/A repeats of a control to the scale of what right runs differ by.

The scale of a signal at a step is the root mean square of the repeats' relative differences to the
control, smoothed over nearby steps (a handful of repeats crosses zero now and then) and never
falling: what rounding did once, it may do again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from harness.judge.curves import (
    common_steps,
    pair,
    relative_difference,
    second_half,
    signed_difference,
)
from harness.judge.floors import JUDGED_SIGNALS, SPREAD_CEILING
from harness.judge.repeats import (
    QUIET,
    Outlier,
    TensorDistances,
    begin_alike,
    flaw_of,
    leaps,
    outlier_among,
    tensor_differences,
)
from harness.judge.tost import end_level
from harness.model import (
    Calibration,
    Evidence,
    Floats,
    Integers,
    RepeatKind,
    SignalScale,
    TensorScale,
)

NEARBY = 0.25
"""Steps within a quarter of t before and after t are near t."""


def calibrate(control: Evidence, repeats: Sequence[Evidence]) -> Calibration:
    """Learn from repeats of a control; what makes a repeat unusable is in ``problems``.

    A repeat that is bit-identical to the control (a plain rerun of a deterministic set-up) proves
    that the set-up is deterministic and teaches no scale: it is not counted.
    """
    vetted = [(repeat, flaw_of(repeat, control)) for repeat in repeats]
    teaching = _teaching(vetted, control)
    distances = tensor_differences(control, teaching)
    outlier = outlier_among(control, teaching, distances)
    learnt = _learn(control, vetted, distances, outlier)
    as_dealt = [each for each in vetted if each[0].repeat != RepeatKind.PERMUTE]
    alike = _teaching(as_dealt, control)
    if len(as_dealt) == len(vetted) or not alike:
        return learnt
    distances = tensor_differences(control, alike)
    if outlier is not None or not begin_alike(control, teaching):
        outlier = outlier_among(control, alike, distances)
    return replace(learnt, alike=_learn(control, as_dealt, distances, outlier))


def _teaching(vetted: Sequence[tuple[Evidence, str]], control: Evidence) -> list[Evidence]:
    """The repeats that have no flaw and differ from the control."""
    return [repeat for repeat, flaw in vetted if not flaw and _differs(repeat, control)]


def _learn(
    control: Evidence,
    vetted: Sequence[tuple[Evidence, str]],
    distances: TensorDistances,
    outlier: Outlier | None,
) -> Calibration:
    """From repeats with their flaws; ``distances`` are those of the teaching ones."""
    repeats = [repeat for repeat, _ in vetted]
    problems = [flaw for _, flaw in vetted if flaw]
    teaching = _teaching(vetted, control)
    if outlier is not None:
        whose = "the control" if outlier.name == control.name else "the repeat"
        problems.append(f"{whose} {outlier.name} is out of line: {outlier.what}")
    signals = {}
    for signal in JUDGED_SIGNALS:
        learnt = _signal_scale(signal, control, teaching)
        if learnt is None:
            continue
        signals[signal] = learnt
        too_wide = learnt.steps[~(learnt.scale <= SPREAD_CEILING[signal])]
        if too_wide.size and not leaps(signal, control, teaching):
            problems.append(
                f"the control {control.name} does not reproduce itself: {signal} of its repeats "
                f"differs by {learnt.scale[-1]:.2g}, from step {too_wide[0]} on by too much to "
                "judge with"
            )
    return Calibration(
        control=control.name,
        identity=control.identity,
        precision=control.precision,
        repeats=tuple(repeat.name for repeat in repeats),
        taught_by=len(teaching),
        signals=signals,
        tensors=_tensor_scales(distances),
        sources=tuple(repeat.source for repeat in repeats),
        problems=tuple(problems),
    )


def _differs(repeat: Evidence, control: Evidence) -> bool:
    curves = (pair(repeat, control, signal) for signal in JUDGED_SIGNALS)
    return any(not np.array_equal(curve.test, curve.control) for curve in curves)


def _signal_scale(
    signal: str, control: Evidence, teaching: Sequence[Evidence]
) -> SignalScale | None:
    curves = [pair(repeat, control, signal) for repeat in teaching]
    curves = [curve for curve in curves if curve.steps.size]
    if not curves:
        return None
    # Usable repeats have the control's steps; one that lacks a value somewhere lacks the step.
    steps = curves[0].steps
    for curve in curves[1:]:
        steps = common_steps(steps, curve.steps).steps
    if not steps.size:
        return None
    with np.errstate(over="ignore"):  # what is too far for a number is infinitely far
        squares = [
            relative_difference(curve.test[there], curve.control[there]) ** 2
            for curve in curves
            for there in [np.isin(curve.steps, steps)]
        ]
    scale = _smooth(np.mean(squares, axis=0), steps)
    growth, doubling = growth_law(steps, scale)
    differences = [signed_difference(second_half(curve)) for curve in curves]
    lasting = _typical([float(np.mean(difference)) for difference in differences])
    ending = None if lasting is None else _typical(list(map(end_level, differences)))
    return SignalScale(steps, scale, growth, doubling, lasting, ending)


def _typical(levels: Sequence[float]) -> float | None:
    """Root mean square; None where a level is no number, or too large for its square to be one."""
    with np.errstate(over="ignore"):
        size = float(np.sqrt(np.mean(np.square(levels))))
    return size if np.isfinite(size) else None


def _smooth(mean_square: Floats, steps: Integers) -> Floats:
    """Root of the mean over nearby steps, then the running maximum."""
    total = np.concatenate([[0.0], np.cumsum(mean_square)])
    low = np.searchsorted(steps, np.ceil(steps * (1 - NEARBY)), side="left")
    high = np.searchsorted(steps, np.floor(steps * (1 + NEARBY)), side="right")
    with np.errstate(invalid="ignore"):
        near = (total[high] - total[low]) / np.maximum(high - low, 1)
    # Behind a step with an infinite difference, as from a control of 0, all differences are.
    near = np.where(np.isnan(near), np.inf, near)
    # Differences of a running sum can round to a little below zero.
    return np.asarray(np.maximum.accumulate(np.sqrt(np.maximum(near, 0.0))), dtype=np.float64)


def growth_law(steps: Integers, scale: Floats) -> tuple[float, float | None]:
    """Exponent of the best power law, and the doubling time if an exponential fits better."""
    known = (scale > 0) & (steps > 0) & np.isfinite(scale)
    if np.count_nonzero(known) < 3 or np.unique(scale[known]).size < 2:  # noqa: PLR2004
        return 0.0, None  # fewer than three points show no law, a constant does not grow
    logarithm = np.log(scale[known])
    when = steps[known].astype(np.float64)
    (power, _), power_off = _line(np.log(when), logarithm)
    (rate, _), exponential_off = _line(when, logarithm)
    doubles = exponential_off < power_off and rate > 0
    return float(power), float(np.log(2) / rate) if doubles else None


def _line(x: Floats, y: Floats) -> tuple[Floats, float]:
    """Slope and intercept of a least-squares line, and the sum of its squared residuals."""
    coefficients = np.polyfit(x, y, 1)
    return coefficients, float(np.sum((np.polyval(coefficients, x) - y) ** 2))


def _tensor_scales(found: TensorDistances) -> dict[int, TensorScale]:
    """Per sampled step, the RMS over repeats of every parameter's relative differences."""
    gradients = {step: list(each.values()) for step, each in found.gradients.items()}
    updates = {step: list(each.values()) for step, each in found.updates.items()}
    return {
        step: TensorScale(
            known,
            _root_mean_square(gradients.get(step)),
            _root_mean_square(updates.get(step)),
            _spread(gradients.get(step)),
            _spread(updates.get(step)),
        )
        for step, known in found.names.items()
    }


def _root_mean_square(differences: Sequence[Floats] | None) -> Floats | None:
    """Over the repeats; a tensor that stayed quiet by chance counts as a tenth of the median."""
    if not differences:
        return None
    size = np.sqrt(np.mean(np.square(differences), axis=0))
    return np.asarray(np.maximum(size, QUIET * np.median(size)), dtype=np.float64)


def _spread(differences: Sequence[Floats] | None) -> float | None:
    """Each repeat against the root mean square of the others; see ``TensorScale``."""
    if differences is None or len(differences) < 2:  # noqa: PLR2004 (one has no others)
        return None
    squares = np.square(differences)
    # A tensor that only some repeats moved is off by infinitely much, and says nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        others = (squares.sum(axis=0) - squares) / (len(squares) - 1)
        above = np.log(squares / others) / 2
    above = above[(squares > others) & (squares > 0)]
    # Only what lies above counts: a quiet repeat is no reason to allow more.
    return float(np.sqrt(np.mean(above**2))) if above.size else 0.0
