"""How much two correct runs may differ by arithmetic alone: tables of fixed numbers.

Where repeats of the control were made, its calibration decides, and these are only lower bounds of
the limits: the effect of one rounding of a reported number, or of a tensor's entries. Without
repeats, and for a test set of coarser precision than its control, which really computes something
else, there is nothing to estimate from, and the second tables decide. Those were chosen by hand
above what was measured on CPU debug models, and are not derived from the model, its size or its
batch.

Every number is a relative difference, as
:func:`converge_harness.judge.compare.curves.relative_difference` has it. Unless a comment names
another source, the numbers were measured on torch 2.13 for CPU, torchtitan 0.3.0 and 0.2.2, on 4-
and 6-layer Llama debug models with and without TP, CP, PP, DDP and HSDP.

Also (:func:`storage`): the spacing of neighbouring numbers in the data type that a run stores its
parameters in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from converge_harness.model import Evidence, Floats, InForce, Integers, Precision

NORMS = ("grad_norm", "grad_norm_recomputed")

FIRST_STEPS = 2
"""Steps that belong to tier 1, where only rounding may differ."""

SPREAD_CEILING: Mapping[str, float] = {
    "loss": 1e-2,
    "grad_norm": 1e-1,
    "loss_recomputed": 1e-2,
    "grad_norm_recomputed": 1e-1,
}
"""Largest spread of repeats from which an envelope may be learnt. A control that differs more
from itself would accept nearly anything, so it judges nothing."""

WIDEST: Mapping[str, float] = {signal: 3 * spread for signal, spread in SPREAD_CEILING.items()}
"""The largest limit that may be learnt: +4.9% on the loss is never accepted. With a lower one,
correct runs of noisy arithmetic would fail (docs/operating-characteristics.md)."""

WIDEST_NORM = 1.0
"""The same for a norm after the first steps, where repeats show that one correct run in 100 is
above the lower one by chance: a norm that is twice the control's."""

TENSOR_CEILING = 0.9
"""The largest limit of a gradient or an update: 1.0 is a tensor that is missing. Slightly more
only where the control's gradient has fallen (``FALLEN_CEILING``)."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Allowed relative difference at step t: ``first * t ** growth``, and never above ``most``.

    Rounding differences random-walk through the optimizer (growth 0.5) as long as training is not
    chaotic; beyond that, the spread of the repeats takes over.
    """

    first: float
    growth: float
    most: float

    def at(self, steps: Integers) -> Floats:
        grown = self.first * np.maximum(steps, 1).astype(np.float64) ** self.growth
        return np.minimum(grown, self.most)


# ------------------------------------------------------------ with a calibration

_FP32_ROUNDING: Mapping[str, Floor] = {
    # Four ulps of a float32 number: the trainer reports one.
    "loss": Floor(4.8e-7, 0.5, 1e-3),
    # A mean over tokens, each rounded once: 5e-9 through step 20, of parallelisms and of an ulp on
    # every initial weight.
    "loss_recomputed": Floor(6e-8, 0.5, 1e-3),
    # torch accumulates the reported norm in float32, shard by shard: 1e-5..8e-5 throughout between
    # correct runs of different sharding, and none at all between repeats, which shard alike.
    "grad_norm": Floor(2e-4, 0.25, 1e-2),
    # In float64 the same norms agree to 5e-9 at step 1 (4e-8 for an ulp on every weight) and to
    # 2.7e-7 through step 20.
    "grad_norm_recomputed": Floor(2.5e-7, 0.75, 1e-2),
}

ROUNDING: Mapping[Precision, Mapping[str, Floor]] = {
    Precision.FP32: _FP32_ROUNDING,
    # The loss is a float32 mean in every regime; the reported norm is a number of the gradients'
    # own dtype: 6.3e-3 in bf16. Float8 layers may sit in a model of either.
    Precision.BF16: {**_FP32_ROUNDING, "grad_norm": Floor(2e-2, 0.25, 1e-1)},
    Precision.FLOAT8: {**_FP32_ROUNDING, "grad_norm": Floor(2e-2, 0.25, 1e-1)},
}
"""Lower bounds of limits where the scale was learnt from repeats."""

TENSOR_ROUNDING: Mapping[Precision, float] = {
    # 32 units of roundoff of float32: TP2's and CP2's gradients match FSDP2's to 4.5e-7.
    Precision.FP32: 2e-6,
    Precision.BF16: 2e-6,
    Precision.FLOAT8: 2e-6,
}
"""The same for a parameter's gradient or update as a whole."""

# --------------------------------------------- without one, or across precisions

FLOORS: Mapping[Precision, Mapping[str, Floor]] = {
    Precision.FP32: {
        # One float32 ulp of the loss is 1.2e-7 relative: seen at step 1 and through step 10;
        # 5.9e-7 by step 40. Bugs start at 4.8e-4 (torch 2.13, TP + compile).
        "loss": Floor(2e-6, 0.5, 1e-3),
        # 5e-9 through step 20, of parallelisms and of an ulp on every initial weight.
        "loss_recomputed": Floor(5e-7, 0.5, 1e-3),
        # As above. Bugs start at 1.9e-3.
        "grad_norm": Floor(2e-4, 0.25, 1e-2),
        # In float64 the same norms agree to 5e-9 at step 1 (4e-8 for an ulp on every weight);
        # 4e-8 by step 20, and the gradient is more sensitive than the loss to weights that drift.
        "grad_norm_recomputed": Floor(1e-6, 0.75, 1e-2),
    },
    Precision.BF16: {
        # Against fp32, parameters in bf16 lose the smallest updates, so that training really
        # falls behind: loss 1.3e-5 at step 1, 2.2e-3 by step 10, 1.05e-2 by step 20 (dim 64, lr
        # 3e-3); 2.2e-4 by step 10 at a lower rate. The growth is that of lost updates.
        "loss": Floor(5e-4, 1.2, 2e-2),
        "loss_recomputed": Floor(5e-4, 1.2, 2e-2),
        # The reported norm is itself a bf16 number: 3.6e-3 at step 1. Where the loss falls fast, a
        # run that is a fraction of a step behind shows it here first: 4.7e-2 at step 10 of the
        # smoke matrix, 3e-2 by step 20.
        "grad_norm": Floor(8e-3, 1.0, 1.5e-1),
        # 1.5e-3 at step 1, 4.8e-2 at step 10, 3.4e-2 by step 20.
        "grad_norm_recomputed": Floor(8e-3, 1.0, 1.5e-1),
    },
    Precision.FLOAT8: {
        # Against fp32 and bf16: loss 1.4e-4 at step 1, 7.6e-4 by step 10, 1.8e-3 by step 20,
        # 1.6e-3 by step 100; grad_norm 2.8e-3 by step 10, 2.2e-2 by step 100 (dim 256), and as
        # under bf16 larger where the loss falls fast: 7e-5 at step 1, 5e-3 at step 5, 3e-2 at
        # step 9 of the smoke matrix. The loss is the sharper signal here: bugs start at 1.5e-2
        # (torch 2.13, Float8 + async TP).
        "loss": Floor(1e-3, 0.5, 2e-2),
        "loss_recomputed": Floor(1e-3, 0.5, 2e-2),
        "grad_norm": Floor(5e-3, 1.0, 1e-1),
        "grad_norm_recomputed": Floor(5e-3, 1.0, 1e-1),
    },
}

GRADIENT_FLOORS: Mapping[Precision, Floor] = {
    Precision.FP32: Floor(1e-5, 1.0, 1e-1),
    Precision.BF16: Floor(6e-2, 1.0, 9e-1),
    Precision.FLOAT8: Floor(3e-1, 0.5, 9e-1),
}
"""A parameter's gradient, relative to its norm."""

UPDATE_FLOORS: Mapping[Precision, Floor] = {
    # AdamW's first update is nearly the gradient's sign: an entry near zero whose sign rounding
    # flips moves the other way, so an update's difference is the square root of its gradient's.
    Precision.FP32: Floor(3e-2, 0.5, 5e-1),
    Precision.BF16: Floor(9e-1, 0.0, 9e-1),
    Precision.FLOAT8: Floor(9e-1, 0.0, 9e-1),
}
"""A parameter's update since the sample before, relative to its norm. Not above 0.9: 1.0 is a
parameter that does not move at all."""

TURNED_SIGNS = 3.0
"""Below fp32, how far an update may be off, relative to its norm, over the square root of its
gradient's difference. AdamW's first updates are nearly signs, and an entry near zero whose sign
rounding flips moves the other way; the repeats may have flipped fewer. If gradient and rounding
are Gaussian the ratio is 2/sqrt(pi) = 1.1; measured up to 2.3 between correct runs in mixed bf16
and Float8, in norms of 64 entries, where single entries count. In fp32 hardly any entry is that
near to zero: 0.07."""
MULTIPLE_LEAVES, MULTIPLE_OFF = 1e-2, 5e-2
"""If a buffer is a multiple of the control's within the first number, the factor may be off by the
second."""
SIGN_STEPS = 2
"""For how many steps that holds; later updates average over gradients."""

SMALLEST_BFLOAT16 = 2.0**-133
"""The distance of 0 from its neighbours in bfloat16; in float32 it is smaller."""
SAME_WEIGHTS = 1e-9
"""A parameter before the first step, relative to its norm: the same seed checkpoint, so the same
bits, which a sketch sums in float64. Half a spacing more where it is stored in a coarser type."""

SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Relative distance of neighbouring numbers, by the data type that parameters are stored in."""
SPACING_FLOAT32 = 2.0**-23
"""The same for all others: mixed precision and Float8 layers keep their weights in float32."""

METRIC_AGREEMENT: Mapping[str, float] = {"loss": 1e-5, "grad_norm": 5e-4}
"""Within one run: what the trainer reports against what the probe recomputes. The loss is a float32
mean in every regime (1.5e-7 measured over 2,400 steps); the norm is summed in the data type of the
gradients, which is that of the parameters (8e-5 in float32 on one older release, else 1e-6, in bf16
mixed and Float8 too)."""
COARSE_NORM_AGREEMENT = 2e-2
"""The same of a norm where parameters are stored in a coarser type (6.7e-3 in bfloat16)."""

CLIPPED_ALIKE = 1e-5
"""All parameters are clipped by one factor, within this: each entry is rounded once, and norms of
whole tensors to 4e-8 (measured). Two spacings where gradients are stored in a coarser type."""

STATE_PER_GRADIENT = 8.0
"""The norms of the optimizer's moments may differ by this many times the gradient's limit: the
second moment is a square, and an average of gradients cancels noise but not a lasting
difference."""
LEAST_STATE_LIMIT = 1e-3
"""Lower bound of that limit: moments contain the factor by which gradients were clipped (its norm
is a float32 sum) and its square. Repeats and DDP differ by 1e-6."""

SAME_BUFFER = 1e-6
"""A buffer that never changes in the control: the same table, computed by the same formula."""
ENTRIES_TURNED = 1.5
"""How far any other buffer may be off, relative to how far it can move in a step times the root
of the steps. A router moves its biases by the signs of token counts about their mean; an expert
whose count is near a tie may go the other way, because experts multiply in bfloat16 whatever the
precision. One such expert of four is 1.0 of the first update, two are 1.4 (measured: PP 2 against
FSDP 2), and over steps they add up at random. A bias that goes the wrong way is off by 2."""

SAME_LR = 1e-6
"""Two lr schedules are the same within this: TensorBoard's float32 costs 6e-8."""

_COARSENESS = (Precision.FP32, Precision.BF16, Precision.FLOAT8)


def coarser(first: Precision, second: Precision) -> Precision:
    """The precision whose floor holds for a pair of runs."""
    return max(first, second, key=_COARSENESS.index)


def spacing(run: Evidence, otherwise: float) -> float:
    """Of the coarsest type that a run stores parameters in; ``otherwise`` where all are fine."""
    return max(SPACING.get(name, otherwise) for name in _types(run))


@dataclass(frozen=True, slots=True)
class Storage:
    """The spacings of a pair of runs, parameter by parameter."""

    coarse: float
    """Of the coarsest type of the two."""
    otherwise: float
    """Of parameters in a fine type."""
    fine: frozenset[str]
    """Names of parameters in a fine type, where others have a coarse one."""

    def spacings(self, names: Sequence[str]) -> Floats:
        """Shape (parameters,): relative to the numbers."""
        return np.array([self.otherwise if name in self.fine else self.coarse for name in names])


def storage(test: Evidence, control: Evidence, otherwise: float) -> Storage:
    """How a pair of runs stores each parameter; ``otherwise`` is the spacing of fine types.

    The control records which of its parameters have a fine type. A test set of the same types has
    to store each as the control does; where it has other types, all count as the coarsest of both.
    """
    coarse = max(spacing(run, otherwise) for run in (test, control))
    fine = _finely_stored(control) if _types(test) == _types(control) else frozenset()
    return Storage(coarse, otherwise, fine)


def _types(run: Evidence) -> tuple[str, ...]:
    return tuple(str((run.in_force or InForce()).param_dtype).split("+"))


def _finely_stored(run: Evidence) -> frozenset[str]:
    """Parameters of a run of several types that are stored in a fine one."""
    by_type = (run.in_force or InForce()).param_dtypes
    return frozenset(
        name for dtype, names in by_type.items() if dtype not in SPACING for name in names
    )
