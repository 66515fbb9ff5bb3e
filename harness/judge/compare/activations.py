"""Compares the modules of two runs in the order of their calls, to find the first difference.

The runs have the same weights and the same first batches. A row of
:class:`converge_harness.model.Activations` holds sums over tokens, which are divided here by the
number of entries: means do not depend on how many ranks hold which tokens, or copies of them.
Where a rank holds a part of a tensor's last dimension, its sums count from where the part begins.
Partial sums, such as the output of a row-wise sharded linear layer before it is reduced, are the
whole tensor only in total; so if the means differ, totals are tried as well. A tensor has one
gradient, in its first row, whatever gets it later.

A distance is relative to the control's projections, or to what the same number of independent
entries of that size would give, whichever is larger: the entries of some gradients cancel (those of
keys add up to zero over a softmax's tokens). Gradients are divided by the factor at which they
leave the loss, because trainers divide by the number of ranks or microbatches at different places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from converge_harness.judge.compare.precision_errors import PrecisionRuns
from converge_harness.model import Activations, Evidence, Floats, ModuleTensor, Precision

BEYOND = 4.0
"""A difference is more than noise from this multiple of it on."""
BEGINS = 2.5
"""A difference that grows beyond that begins where it leaves this multiple: correct set-ups stay
below (docs/judging.md)."""
FLOORS: Mapping[Precision, float] = {
    Precision.FP32: 1e-6,
    Precision.BF16: 1e-3,
    Precision.FLOAT8: 1e-2,
}
"""Smallest noise of a row: rounding that no repeat happened to show."""
_HEAD = 3
"""Columns before the projections."""


@dataclass(frozen=True, slots=True)
class ModuleDifference:
    """How far a row of the test set is from the control's."""

    row: ModuleTensor
    distance: float
    """Relative. Not finite if the test set's row is not."""
    noise: float
    """The same between runs that only rounding separates."""
    is_zero: bool = False
    """Whether the test set's is zero everywhere, and the control's is not."""
    taken_by: tuple[str, ...] = ()
    """The modules that get this tensor, in the order of their calls."""

    @property
    def multiple(self) -> float:
        """The distance in multiples of the noise."""
        return self.distance / self.noise

    @property
    def is_off(self) -> bool:
        return not self.distance <= BEYOND * self.noise


@dataclass(frozen=True, slots=True)
class ModuleComparison:
    """The modules of a test set and its control, in the order of the control's calls."""

    forward: tuple[ModuleDifference, ...]
    backward: tuple[ModuleDifference, ...]
    """In the same order, so the last one is the first of the backward pass."""
    factor: float
    """Gradients of the test set over the control's where they leave the loss."""
    not_compared: tuple[str, ...] = ()
    """Modules of either run none of whose tensors has values that can be compared in both: the
    other run has no such module, its ranks' parts could not be read, or values are infinite."""

    @property
    def first_off(self) -> ModuleDifference | None:
        """The first difference of the forward pass, else of the backward pass; None without one."""
        for rows in (self.forward, tuple(reversed(self.backward))):
            if any(each.is_off for each in rows):
                return next(each for each in rows if not each.distance <= BEGINS * each.noise)
        return None


def compare_modules(
    test: Evidence,
    control: Evidence,
    learnt: Mapping[ModuleTensor, float],
    measure: PrecisionRuns | None = None,
) -> ModuleComparison | None:
    """Compare the modules that both runs recorded; None if one of them recorded none.

    Args:
        test: of a test set.
        control: its control; a test set of another precision is compared with its matched control.
        learnt: the noise of rows, from repeats of the control.
        measure: the runs that errors of low precision are measured against.
    """
    other = measure.matched if measure else control
    if test.activations is None or other.activations is None:
        return None
    noise = dict(learnt) if other is control else {}
    if measure and measure.reference.activations is not None:
        for row, distance in distances(other.activations, measure.reference.activations).items():
            noise[row] = max(distance, noise.get(row, 0.0))
    floor = max(FLOORS[test.precision], FLOORS[other.precision])
    factor = _loss_factor(test.activations, other.activations)
    taken_by = _taken_by(other.activations)
    found = [
        ModuleDifference(
            row,
            _distance(mine, its),
            max(noise.get(row, 0.0), floor),
            is_zero=mine.squares == 0 < its.squares,
            taken_by=taken_by.get((row.module, row.tensor), ()),
        )
        for row, mine, its in _pairs(test.activations, other.activations, factor)
    ]
    compared = {each.row.module for each in found}
    recorded = dict.fromkeys((*other.activations.modules, *test.activations.modules))
    return ModuleComparison(
        tuple(each for each in found if not each.row.backward),
        tuple(each for each in found if each.row.backward),
        factor,
        tuple(each for each in recorded if each not in compared),
    )


def _taken_by(rows: Activations) -> dict[tuple[str, str], tuple[str, ...]]:
    """By the first row of every tensor: the modules that get it."""
    names = list(zip(rows.modules, rows.tensors, strict=True))
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for (module, tensor), first in zip(names, rows.same_as.tolist(), strict=True):
        if ModuleTensor(module, tensor, backward=False).is_input:
            found[names[first]] = (*found.get(names[first], ()), module)
    return found


def learnt_noise(control: Evidence, repeats: Sequence[Evidence]) -> dict[ModuleTensor, float]:
    """How far repeats are from the control, row by row: the median over the repeats.

    A median, so that one bad repeat hides nothing.
    """
    base = control.activations
    found: dict[ModuleTensor, list[float]] = {}
    for repeat in repeats:
        if base is None or repeat.activations is None:
            continue
        for row, distance in distances(repeat.activations, base).items():
            if np.isfinite(distance):
                found.setdefault(row, []).append(distance)
    return {row: float(np.median(values)) for row, values in found.items()}


def distances(
    test: Activations, other: Activations, factor: float = 1.0
) -> dict[ModuleTensor, float]:
    """Distances of the rows that both have, in the order of ``other``'s calls.

    ``factor`` is what the gradients of ``test`` are divided by first.
    """
    return {row: _distance(mine, its) for row, mine, its in _pairs(test, other, factor)}


class _Sums(NamedTuple):
    """A row, summed over batches."""

    entries: float
    squares: float
    first: Floats
    """Shape (signs,): signed sums of the entries."""
    second: Floats
    """The same of their squares."""
    some: float
    """Entries of tokens in one half of the vocabulary; 0: unknown."""
    first_of_some: Floats


def _pairs(
    test: Activations, other: Activations, factor: float
) -> Iterator[tuple[ModuleTensor, _Sums, _Sums]]:
    """Every row with a value in both, and its sums over the batches that both have.

    Summed, because rounding of one batch has nothing to do with that of another.
    """
    place = {key: row for row, key in enumerate(zip(test.modules, test.tensors, strict=True))}
    batches = min(len(test.forward), len(other.forward))
    for backward in (False, True):
        tables = (test.backward, other.backward) if backward else (test.forward, other.forward)
        mine, its = (table[:batches].sum(axis=0) for table in tables)
        for row, key in enumerate(zip(other.modules, other.tensors, strict=True)):
            if key not in place or not np.isfinite(its[row]).all():
                continue  # a mask of infinities, for example
            if mine[place[key], 0] and its[row, 0]:
                cut = bool(test.widths[place[key]] != other.widths[row])
                yield (
                    ModuleTensor(*key, backward),
                    _sums(mine[place[key]], cut=cut, factor=factor**backward),
                    _sums(its[row], cut=cut),
                )


def _sums(row: Floats, *, cut: bool, factor: float = 1.0) -> _Sums:
    """``cut`` says that one of the two runs holds parts of rows on its ranks."""
    signs = (len(row) - _HEAD) // 6
    first, of_some, second = row[_HEAD:].reshape(3, 2, signs)[:, int(cut)]
    return _Sums(
        entries=float(row[0]),
        squares=float(row[1]) / factor**2,
        first=first / factor,
        second=second / factor**2,
        some=float(row[2]),
        first_of_some=of_some / factor,
    )


def _distance(test: _Sums, other: _Sums) -> float:
    """Of the means, or of the totals if those are closer; infinite if something is not finite."""
    if not np.isfinite([test.squares, *test.first]).all():
        return float("inf")
    # Squares are positive: their own projections are the larger scale.
    second = _norm(
        test.second / test.entries - other.second / other.entries,
        _norm(other.second, 1.0) / other.entries,
    )
    firsts = [(test.first, test.entries, other.first, other.entries)]
    if test.some and other.some:
        firsts.append((test.first_of_some, test.some, other.first_of_some, other.some))
    means, totals = [second], []
    for mine, count, its, of in firsts:
        # The larger of the projections, and what independent entries of this size would give.
        scale = max(_norm(its, 1.0), float(np.sqrt(len(its) * other.squares * of / other.entries)))
        means.append(_norm(mine / count - its / of, scale / of))
        totals.append(_norm(mine - its, scale))
    copies = test.entries != other.entries
    return min(max(means), max(totals)) if copies else max(means)


def _norm(values: Floats, scale: float) -> float:
    norm = float(np.linalg.norm(values))
    return norm / scale if scale else (0.0 if norm == 0 else float("inf"))


def _loss_factor(test: Activations, other: Activations) -> float:
    """Gradients of ``test`` over ``other``'s in the last tensor that has one; 1 if unknown."""
    last = [each for each in _pairs(test, other, 1.0) if each[0].backward][-1:]
    for _, mine, its in last:
        below = float(its.first @ its.first) / its.entries
        ratio = float(mine.first @ its.first) / mine.entries / below if below else 0.0
        if np.isfinite(ratio) and ratio > 0:
            return ratio
    return 1.0
