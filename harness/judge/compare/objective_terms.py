"""Which term of an objective differs first, and in which parts of a step tokens weigh the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from converge_harness.model import ObjectiveTerm, ObjectiveTerms, Precision

_EVEN = 1e-4
"""Weights that differ by a smaller share are the same: they are rounded to the program's type."""
_ALIKE: Mapping[Precision, float] = {Precision.FP32: 1e-4}
"""Share of a term's size by which rounding may change its sums: scores of correct programs, which
terms are made of, differ by 2e-6 in float32 (docs/rl.md) …"""
_ALIKE_LOWER = 5e-2
"""… and by about 1e-2 in bfloat16."""


class TermsDiffer(NamedTuple):
    """How a test set's objective is made otherwise than its control's at one step."""

    ours: ObjectiveTerms
    theirs: ObjectiveTerms
    wrong: tuple[str, ...]
    """Terms whose values differ, in the program's order."""
    detached: tuple[str, ...]
    """Terms of the same values that depend on parameters in one of the runs only."""

    @property
    def counts_others(self) -> bool:
        return self.ours.tokens != self.theirs.tokens

    @property
    def evened_otherwise(self) -> bool:
        return even_in(self.ours) != even_in(self.theirs)

    @property
    def sums_otherwise(self) -> bool:
        ours, theirs = self.ours.weight, self.theirs.weight
        return not math.isclose(ours, theirs, rel_tol=_EVEN)


def even_in(terms: ObjectiveTerms) -> str | None:
    """The largest part of a step in each of which all tokens weigh the same; None for none."""
    return next((part for part, uneven in terms.uneven.items() if uneven <= _EVEN), None)


def compare_terms(
    ours: ObjectiveTerms, theirs: ObjectiveTerms, precision: Precision
) -> TermsDiffer:
    """Compare the terms that both runs show at the same step, of the same samples and weights."""
    both = [name for name in theirs.terms if name in ours.terms]
    most = _ALIKE.get(precision, _ALIKE_LOWER)
    wrong = tuple(
        name for name in both if not _same(ours.terms[name], theirs.terms[name], theirs, most)
    )
    detached = tuple(
        name
        for name in both
        if name not in wrong and ours.terms[name].trains is not theirs.terms[name].trains
    )
    return TermsDiffer(ours, theirs, wrong, detached)


def same_values_elsewhere(one: ObjectiveTerm, other: ObjectiveTerm, tokens: int) -> bool:
    """Whether a term that differs has the values of the other, on other tokens."""
    size = _size(other, tokens)
    return abs(one.total - other.total) <= _EVEN * size and math.isclose(
        one.squares, other.squares, rel_tol=_EVEN
    )


def _same(one: ObjectiveTerm, other: ObjectiveTerm, terms: ObjectiveTerms, most: float) -> bool:
    """Sums of terms that are not finite in both runs are the same."""
    pairs = (
        (one.total, other.total, _size(other, terms.tokens)),
        (one.mixed, other.mixed, _size(other, terms.tokens)),
        (one.squares, other.squares, other.squares),
    )
    return all(
        abs(ours - theirs) <= most * size or not (math.isfinite(ours) or math.isfinite(theirs))
        for ours, theirs, size in pairs
    )


def _size(term: ObjectiveTerm, tokens: int) -> float:
    """The largest sum that values of these squares can have."""
    return math.sqrt(term.squares * tokens)
