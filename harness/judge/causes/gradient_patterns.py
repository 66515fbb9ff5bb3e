"""How a model's tensors differ: scaled, of another direction, all zeros, or exchanged.

Two sketches give the best ``test = factor x control`` of a tensor and its residual
(:func:`converge_harness.judge.compare.sketches.fit`). The residual is *rounding* when it would be
inside the tensor's own limit, or nearly: limits are those of the precision, or learnt from repeats.

The norm of a tensor does not depend on the order of its entries, and is computed in float64. So it
shows correct numbers in wrong places: exchanged shards and transposed tensors keep it, and a
gradient that another parameter got has the norm of the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from converge_harness.judge.causes.context import Context
from converge_harness.judge.causes.parameter_names import joined
from converge_harness.judge.compare.sketches import fit
from converge_harness.judge.compare.tensors import TensorComparison, TensorDifferences
from converge_harness.model import Floats, Integers, Precision, TensorRows

LEAST_ROUNDING, MOST_ROUNDING = 1e-5, 0.25
"""Largest residual of a factor, whatever the limit: a limit of 0.9 would accept anything."""
DOMINATES = 3.0
"""A tensor is scaled when the factor explains this many times its residual, if that is rounding,
…"""
OUTWEIGHS = 30.0
"""… and this many times if it is not: something else is wrong as well, and matters less."""
SAME_FACTOR = 1e-4
"""Factors nearer than this are one, whatever the rounding."""
PART_LEAVES = 0.1
"""Largest residual of a part that explains a difference, and how much its multiples may differ: the
difference itself is only little more than rounding."""
MOST_FACTORS = 3
"""With more factors than these every tensor has its own."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Tensors that are the control's times one factor."""

    factor: float
    members: tuple[int, ...]
    residual: float
    """The largest residual of any, relative to its norm."""
    clean: bool
    """Whether that is rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Sorting:
    """Indices into the names of a comparison; each is in one group at most."""

    judged: tuple[int, ...]
    """Those that are not zero on both sides."""
    right: tuple[int, ...]
    scaled: tuple[Scaled, ...]
    """Largest group first."""
    gone: tuple[int, ...]
    """Zero in the test set only."""
    turned: tuple[int, ...]
    """Off in direction; furthest outside its limit first."""
    factors: Floats
    residuals: Floats
    """Shape (parameters,), of every tensor."""

    @property
    def off(self) -> tuple[int, ...]:
        return (*self.gone, *(i for each in self.scaled for i in each.members), *self.turned)

    @property
    def factor_of_all(self) -> Scaled | None:
        """The factor that all judged tensors share; None when there is none."""
        alone = len(self.scaled) == 1 and len(self.scaled[0].members) == len(self.judged)
        return self.scaled[0] if alone else None


def sort(test: Floats, control: Floats, found: TensorDifferences) -> Sorting:
    """Sort tensors by their sketches, shape (parameters, k); the limits say what rounding is."""
    fits = [fit(ours, theirs) for ours, theirs in zip(test, control, strict=True)]
    factors = np.array([each.factor for each in fits])
    residuals = np.array([each.residual for each in fits])
    ours, theirs = (np.linalg.norm(sketches, axis=1) for sketches in (test, control))
    judged = [int(index) for index in np.flatnonzero((ours != 0) | (theirs != 0))]
    outside = [int(index) for index in found.outside]
    gone = [index for index in outside if ours[index] == 0]
    left = [index for index in outside if index not in set(gone)]

    rounding = residual_limits(found)
    with np.errstate(invalid="ignore", divide="ignore"):
        explained = np.minimum(np.abs(factors - 1), np.abs(1 - 1 / factors)) / residuals
    clean = residuals <= rounding
    pure = np.where(clean, explained > DOMINATES, explained > OUTWEIGHS)
    groups = _groups([index for index in left if pure[index]], factors, residuals)
    scaled = tuple(
        Scaled(
            float(np.median(factors[group])),
            tuple(group),
            float(residuals[group].max()),
            bool(clean[group].all()),
        )
        for group in groups
    )
    known = {index for group in groups for index in group}
    if scaled and known == set(outside) and len(known) < len(judged):
        # Tensors inside their limits may be scaled as well, by too little to be outside.
        whole = scaled_together(test, control, judged)
        scaled, outside = ((whole,), judged) if whole is not None else (scaled, outside)
    return Sorting(
        judged=tuple(judged),
        right=tuple(index for index in judged if index not in set(outside)),
        scaled=scaled,
        gone=tuple(gone),
        turned=tuple(index for index in left if index not in known),
        factors=factors,
        residuals=residuals,
    )


def residual_limits(found: TensorDifferences) -> Floats:
    """Shape (parameters,): largest residual of a tensor that counts as explained."""
    return np.clip(2 * found.limit, LEAST_ROUNDING, MOST_ROUNDING)


def _groups(members: Sequence[int], factors: Floats, residuals: Floats) -> list[list[int]]:
    """Tensors with the same factor, the largest group first."""
    groups: list[list[int]] = []
    for index in sorted(members, key=lambda index: float(factors[index])):
        last = groups[-1][-1] if groups else None
        if last is not None:
            allowed = max(SAME_FACTOR, DOMINATES * float(max(residuals[last], residuals[index])))
            if abs(factors[index] / factors[last] - 1) <= allowed:
                groups[-1].append(index)
                continue
        groups.append([index])
    return sorted(groups, key=len, reverse=True)


def scaled_together(test: Floats, control: Floats, judged: Sequence[int]) -> Scaled | None:
    """All judged tensors as one multiple of the control's, however near to 1; None if they are not.

    The difference of each tensor has to be one multiple of the control's tensor.
    """
    rows = list(judged)
    share = common_multiple(test[rows] - control[rows], control[rows])
    if share is None:
        return None
    left = [fit(test[row], control[row]).residual for row in rows]
    return Scaled(1 + share, tuple(rows), float(max(left)), clean=True)


def common_multiple(test: Floats, basis: Floats) -> float | None:
    """The one multiple of a basis that sketches are, shape (tensors, k); None if they are not one.

    Sketches are linear, so they recognise sums of tensors: the basis is a possible part of a
    difference, and for every tensor little remains when the same multiple is subtracted.
    """
    fits = [fit(ours, theirs) for ours, theirs in zip(test, basis, strict=True)]
    if not fits or not all(each.residual <= PART_LEAVES for each in fits):
        return None
    middle = float(np.median([each.factor for each in fits]))
    alike = all(abs(each.factor - middle) <= PART_LEAVES * abs(middle) for each in fits)
    return middle if middle and alike else None


NAMED = 3
"""How many tensors a sentence names one by one."""


class Wrong(NamedTuple):
    """A sample with gradients outside their limits."""

    step: int
    names: tuple[str, ...]
    sizes: Integers
    test: TensorRows
    control: TensorRows
    found: TensorDifferences
    sorting: Sorting

    def named(self, indices: Iterable[int]) -> list[str]:
        return [self.names[index] for index in indices]

    @property
    def among(self) -> list[str]:
        """All parameters with a gradient on either side."""
        return self.named(self.sorting.judged)

    @property
    def off(self) -> list[str]:
        return self.named(self.sorting.off)


def wrong_gradients(sample: TensorComparison | None) -> Wrong | None:
    """None when the sample has none, or they are all inside."""
    if sample is None or sample.gradients is None or not sample.gradients.outside.size:
        return None
    ours, theirs = sample.test.gradients, sample.control.gradients
    if ours is None or theirs is None:
        return None
    sorting = sort(ours.sketch, theirs.sketch, sample.gradients)
    sizes = sample.control.sizes
    return Wrong(sample.step, sample.names, sizes, ours, theirs, sample.gradients, sorting)


def worst_tensors(wrong: Wrong) -> str:
    """The worst tensors with relative difference, best factor and its residual."""
    sorting, difference = wrong.sorting, wrong.found.difference
    parts = []
    for index in sorting.turned[:NAMED]:
        if np.isfinite(sorting.factors[index]):
            best = f"best factor {sorting.factors[index]:.3g}, with a residual of "
            left = f"{best}{sorting.residuals[index]:.2g}"
            parts.append(f"{wrong.names[index]} by {difference[index]:.2g} ({left})")
        else:
            parts.append(f"{wrong.names[index]} (no multiple of the control's)")
    return joined(parts)


SAME_NORM = 1e-5
"""Relative difference of two norms that another order of the sum explains, with a safety margin."""
FAR = 0.1
"""A gradient that is off by this and keeps its norm to ``SAME_NORM`` does not do so by chance."""
_NAMED = 3


def displaced(
    names: Sequence[str],
    sizes: Integers,
    norms: tuple[Floats, Floats],
    turned: Sequence[int],
    difference: Floats,
) -> str:
    """A clause, after a semicolon, if all wrong gradients seem to be misplaced; else empty.

    Args:
        names: of all parameters.
        sizes: entries of each, shape (parameters,).
        norms: of the gradients of the test set and of the control, shape (parameters,) each.
        turned: indices of the gradients that are wrong in direction.
        difference: relative differences, shape (parameters,).
    """
    ours, theirs = norms
    far = [index for index in turned if difference[index] > FAR and theirs[index] > 0]
    if not far or len(far) < len(turned):
        return ""
    if all(abs(ours[index] / theirs[index] - 1) <= SAME_NORM for index in far):
        return (
            "; every one has the norm of the control's: the same numbers in other places, as if "
            "shards or ranks are exchanged, or a tensor is transposed"
        )
    found = []
    for index in far:
        alike = (sizes == sizes[index]) & (np.abs(theirs - ours[index]) <= SAME_NORM * ours[index])
        alike[index] = False
        if np.count_nonzero(alike) != 1:
            return ""
        found.append(f"{names[index]} that of {names[int(np.flatnonzero(alike)[0])]}")
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"; by its norm {joined(found[:_NAMED])}{more} in the control: gradients are exchanged"


_BF16_ROUNDING = (5e-4, 2e-2)
"""Relative differences that a cast or a sum in bfloat16 leaves of a tensor in float32."""


def rounding_clause(wrong: Wrong, context: Context) -> str:
    """Whether all wrong tensors are off by as much as rounding to bfloat16."""
    difference = wrong.found.difference[list(wrong.sorting.off)]
    low, high = _BF16_ROUNDING
    fp32 = context.precision is Precision.FP32
    if not fp32 or np.median(difference) < low or not np.all(difference < high):
        return ""
    return (
        "; all by little, as by rounding to bfloat16: perhaps a cast or a reduction in "
        "lower precision"
    )
