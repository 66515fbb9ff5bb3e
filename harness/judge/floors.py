"""How much two right runs may differ by arithmetic alone: one table of fixed numbers.

They were chosen by hand above what was measured on CPU debug models, and are not derived from the
model, its size or its batch. Those of fp32 leave a wide gap to the bugs that were measured. Those
of bf16 and Float8 were fitted to runs that include the ones that they now judge, so such sets only
show gross errors until limits are calibrated per model.

Every number is a relative difference (see :func:`harness.judge.curves.relative_difference`).
Unless a comment names another source, the numbers were measured on torch 2.13 for CPU, torchtitan
0.3.0 and 0.2.2, on 6-layer Llama debug models with and without TP, CP, PP, DDP and HSDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.model import Precision

JUDGED_SIGNALS = ("loss", "grad_norm", "loss_recomputed", "grad_norm_recomputed")
"""Signals that have an envelope; the recomputed two are the probe's, in float64."""

SPREAD_FACTOR = 3.0
"""The envelope is this many times the spread of the control's repeats: three, because a handful
of repeats shows no more than about one standard deviation of what rounding can do."""

SPREAD_CEILING: Mapping[str, float] = {
    "loss": 1e-2,
    "grad_norm": 1e-1,
    "loss_recomputed": 1e-2,
    "grad_norm_recomputed": 1e-1,
}
"""Largest spread of repeats from which an envelope may be learnt. A control that differs more
from itself would excuse nearly anything (+4.9% on the loss, say), so it judges nothing."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Allowed relative difference at step t: ``first * t ** growth``, and never above ``most``.

    Rounding differences random-walk through the optimizer (growth 0.5) as long as training is not
    chaotic; beyond that, the spread of the ulp repeats takes over.
    """

    first: float
    growth: float
    most: float

    def at(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        grown = self.first * np.maximum(steps, 1).astype(np.float64) ** self.growth
        return np.minimum(grown, self.most)


FLOORS: Mapping[Precision, Mapping[str, Floor]] = {
    Precision.FP32: {
        # One float32 ulp of the loss is 1.2e-7 relative: seen at step 1 and through step 10;
        # 5.9e-7 by step 40. Bugs start at 4.8e-4 (torch 2.13, TP + compile).
        "loss": Floor(2e-6, 0.5, 1e-3),
        # 5e-9 through step 20, of parallelisms and of an ulp on every initial weight.
        "loss_recomputed": Floor(5e-7, 0.5, 1e-3),
        # torch accumulates the reported norm in float32, shard by shard: 1e-5..8e-5 throughout
        # between right runs of different sharding (dim 256; 3e-7 for dim 64). Bugs start at 1.9e-3.
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

METRIC_AGREEMENT: Mapping[Precision, Mapping[str, float]] = {
    # Within one run: what the trainer reports against what the probe recomputes. The loss is a
    # float32 mean in every regime (1.5e-7 measured); the norm accumulates in the gradients' own
    # dtype (8e-5 in fp32, 6.3e-3 in bf16; Float8 layers may sit in a model of either).
    Precision.FP32: {"loss": 1e-5, "grad_norm": 5e-4},
    Precision.BF16: {"loss": 1e-4, "grad_norm": 2e-2},
    Precision.FLOAT8: {"loss": 1e-4, "grad_norm": 2e-2},
}

SAME_LR = 1e-6
"""Two lr schedules are the same within this: TensorBoard's float32 costs 6e-8."""

_COARSENESS = (Precision.FP32, Precision.BF16, Precision.FLOAT8)


def coarser(first: Precision, second: Precision) -> Precision:
    """The precision whose floor holds for a pair of runs."""
    return max(first, second, key=_COARSENESS.index)
