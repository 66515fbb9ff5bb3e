"""In which way a reported number is off from the one that the probe recomputes in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from harness.judge.agreement import Agreement, agreement
from harness.judge.causes.norm_parts import part_words
from harness.judge.factors import Match, named_factor
from harness.judge.scene import CONSTANT, Scene
from harness.model import Floats, Integers

_FEWEST = 3
"""Steps that a way other than a named factor must hold for: one number fits many formulas."""
_MANTISSAS = {"bfloat16": 8, "float16": 11}
"""Bits of the significand, with the implicit one (IEEE 754, and bfloat16 as torch has it)."""
_NEAR = 3.0
"""Times the limit of agreement: nothing drifts between two numbers of one run."""
_MOST_SHARE = 0.9
"""Of a new value in a running mean; with more it is hardly one."""
_TWICE = 2.0
"""A sum of two rounded numbers is off by at most so many times the rounding of one."""


class Way(NamedTuple):
    """How a metric is wrong."""

    words: str = ""
    """A clause with a leading comma; empty when the run reports what it computes."""
    where: str = ""
    """What this way adds to what a person should look at."""


def way_of(signal: str, scene: Scene) -> Way:
    """How ``loss`` or ``grad_norm`` is misreported; the first that fits, most certain first."""
    compared = agreement(scene.case.test, signal)
    if compared is None or not compared.outside.size:
        return Way()
    known = (way for look in _WAYS if (way := look(compared, scene)))
    return next(known, Way())


def _factor(compared: Agreement, scene: Scene) -> Way | None:
    """One factor, or a number of the run: nothing drifts, so it is met nearly exactly.

    At the steps that are off: the others may be right.
    """
    off = np.isin(compared.steps, compared.outside)
    ratio, steps = _ratio(compared)[off], compared.steps[off]
    near = _NEAR * compared.limit.value
    few = "" if off.all() else f" at {steps.size} of {off.size} steps"
    words = _named(ratio, steps, scene, Match(near, near))
    if words:
        return Way(f"{few}, which equals {words}")
    if compared.signal == "grad_norm":  # squares of norms add up, or are averaged
        words = _named(ratio**2, steps, scene, Match(2 * near, 2 * near))
        if words:
            return Way(f"{few}, which equals the square root of {words}")
    return None


def _constant(compared: Agreement, _: Scene) -> Way | None:
    """One factor that equals nothing known, at the steps that are off."""
    off = np.isin(compared.steps, compared.outside)
    ratio, near = _ratio(compared)[off], _NEAR * compared.limit.value
    middle = float(np.median(ratio))
    if ratio.size < _FEWEST or abs(middle - 1) <= _NEAR * near:
        return None
    if not np.all(np.abs(ratio - middle) <= near * abs(middle)):
        return None
    where = "every step" if off.all() else f"{ratio.size} of {off.size} steps"
    return Way(f", the same {middle:.6g} times the recomputed one at {where}")


def _late(compared: Agreement, _: Scene) -> Way | None:
    """Each value is that of the step before."""
    if compared.steps.size < _FEWEST or not np.all(np.diff(compared.steps) == 1):
        return None
    if not _same(compared.reported[1:], compared.recomputed[:-1], compared):
        return None
    return Way(
        ", one step late: each value is the recomputed one of the step before",
        "when the value is copied from the device: an asynchronous copy, or a buffer used again",
    )


def _stale(compared: Agreement, _: Scene) -> Way | None:
    """The value stays where it was, and the recomputed one moves on."""
    still = np.diff(compared.reported) == 0
    moving = np.diff(compared.recomputed) != 0
    stays = still & moving & np.isin(compared.steps[1:], compared.outside)
    last = int(np.flatnonzero(~stays)[-1]) + 1 if not stays.all() else 0
    if stays.size - last < _FEWEST:
        return None
    return Way(
        f", the same value at every step from step {compared.steps[last]} on",
        "when the value is computed anew and copied from the device",
    )


def _running_mean(compared: Agreement, _: Scene) -> Way | None:
    """An exponential mean over steps: each value moves by one share towards the recomputed one."""
    if compared.steps.size <= _FEWEST:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.diff(compared.reported) / (compared.recomputed[1:] - compared.reported[:-1])
    share = float(np.median(shares))
    if not 0 < share < _MOST_SHARE or not np.all(np.abs(shares - share) <= CONSTANT * share):
        return None
    return Way(f", a running mean over steps: each takes {share:.3g} of the recomputed one")


def _formula(compared: Agreement, _: Scene) -> Way | None:
    """A root that is missing or taken twice, a perplexity."""
    value = compared.recomputed
    with np.errstate(invalid="ignore", over="ignore"):
        formulas = {
            "the square of the recomputed one": value**2,
            "the square root of the recomputed one": np.sqrt(value),
            "the exponential of the recomputed one": np.exp(value),
        }
    for words, expected in formulas.items():
        if _same(compared.reported, expected, compared):
            return Way(f", {words}")
    return None


def _clipped(compared: Agreement, scene: Scene) -> Way | None:
    """What clipping leaves of a norm."""
    config = scene.in_force.get("config") or {}
    most = config.get("training.max_norm")
    if compared.signal != "grad_norm" or not isinstance(most, int | float) or most <= 0:
        return None
    if not _same(compared.reported, np.minimum(compared.recomputed, most), compared):
        return None
    return Way(
        f", what clipping to {most:g} leaves of the recomputed one",
        "whether the norm is taken before or after clipping",
    )


def _part(compared: Agreement, scene: Scene) -> Way | None:
    """The norm of a part of the model."""
    words = part_words(compared, scene) if compared.signal == "grad_norm" else ""
    return Way(f", {words}") if words else None


def _rounded(compared: Agreement, _: Scene) -> Way | None:
    """Every value is one of a coarser format."""
    fraction = np.frexp(compared.reported)[0]
    for name, bits in _MANTISSAS.items():
        steps = fraction * 2.0**bits
        near = compared.difference <= _TWICE * 2.0**-bits
        if np.all(steps == np.round(steps)) and np.all(near):
            return Way(
                f", as rounded to {name}", "in which precision the value is summed and reduced"
            )
    return None


def _varying(compared: Agreement, scene: Scene) -> Way | None:
    """Another factor at every step."""
    off = np.isin(compared.steps, compared.outside)
    ratio, steps = _ratio(compared)[off], compared.steps[off]
    if not np.all(np.isfinite(ratio)):
        return None
    spread = f"from {ratio.min():.6g} to {ratio.max():.6g} times the recomputed one"
    about = _named(ratio, steps, scene, Match())
    if about:
        return Way(f", {spread}: about {about}; so would be a rank's or microbatch's part alone")
    return Way(f", {spread}, by no single factor")


_WAYS: tuple[Callable[[Agreement, Scene], Way | None], ...] = (
    _clipped,
    _factor,
    _late,
    _constant,
    _stale,
    _running_mean,
    _formula,
    _part,
    _rounded,
    _varying,
)


def _ratio(compared: Agreement) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(compared.reported / compared.recomputed, dtype=np.float64)


def _named(ratio: Floats, steps: Integers, scene: Scene, match: Match) -> str:
    return named_factor(ratio, steps, scene.case.test, scene.case.control, match).words


def _same(values: Floats, expected: Floats, compared: Agreement) -> bool:
    """Whether values agree as well as a report should, at enough steps to tell."""
    allowed = compared.limit.value * np.abs(expected)
    return values.size >= _FEWEST - 1 and bool(np.all(np.abs(values - expected) <= allowed))
