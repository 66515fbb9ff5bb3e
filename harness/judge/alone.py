"""Two curves and nothing else: no gradients, no audit, and no repeat that shows what noise is.

(A repeat that is the same to the last bit shows it, too: there is none on this machine.)

Right runs on other hardware, or with other kernels, part by rounding, and how far depends on the
model, the data and the length of the run: from 1e-7 to tens of percent at a step. So a difference
between two curves alone says nothing by itself. Within the arithmetic's floor and the digits that
are printed they are the same; within a margin that somebody asked for they are equivalent; and what
is *gross* is no rounding. Everything between is open, until repeats of the control, a tolerance or
a margin say what right runs do here.

Gross is what hardly any right pair does. Of 1,463 pairs of Megatron-LM's golden curves (one test on
other GPUs, or in another container, 2026) the loss at a step of 1 was off by 90% (by 112%, a spike
in a run of 3,000 points), and the mean of the second half of 2 by more than 10%; torchtitan's
published curves of CUDA and ROCm are off by up to 41% at a step, and 5% in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from harness.judge.curves import Pair, second_half
from harness.model import Evidence, Floats, Integers


class Gross(NamedTuple):
    """From where on a difference is gross, relative to the smaller value."""

    step: float
    """At a single step."""
    lasting: float
    """Of the mean over the second half of the run."""


GROSS: Mapping[str, Gross] = {"loss": Gross(0.9, 0.1), "grad_norm": Gross(9.0, 0.5)}
"""The loss by 90%, so that a factor of 2 is gross however it is printed, or 10% in the mean; the
grad norm, which spikes and which noise moves more, by a factor of 10, or 50% in the mean."""
SMALL = 0.1
"""Share of a signal's first value below which differences are relative to that: what is nearly
learnt by heart is off by any factor."""
REPEATS = 3
"""Repeats of the control that are asked for: with fewer, limits are much wider."""


def curves_alone(test: Evidence, control: Evidence) -> bool:
    """Whether neither run left anything beside its curves."""
    return all(
        evidence.in_force is None
        and not evidence.samples
        and "loss_recomputed" not in evidence.signals
        and "grad_norm_recomputed" not in evidence.signals
        for evidence in (test, control)
    )


def gross_steps(signal: str, curves: Pair) -> Integers:
    """The steps at which two curves are grossly different; shape (any number of steps,)."""
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(curves.test - curves.control) / _scale(curves)
    # Written so that NaN is gross.
    return curves.steps[~(off < GROSS[signal].step)]


def lasting_difference(curves: Pair) -> float:
    """How far the means over the second half lie apart, relative as steps are; 0 for no step."""
    half = second_half(curves)
    if not half.steps.size:
        return 0.0
    scale = _scale(curves)[curves.steps.size // 2 :]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(abs(np.mean((half.test - half.control) / scale)))


def _scale(curves: Pair) -> Floats:
    """What a difference is relative to, step by step; never 0 but where both start from 0."""
    if not curves.steps.size:
        return np.empty(0)
    first = SMALL * max(abs(float(curves.test[0])), abs(float(curves.control[0])))
    smaller = np.minimum(np.abs(curves.test), np.abs(curves.control))
    return np.maximum(np.maximum(smaller, first), np.finfo(np.float64).tiny)
