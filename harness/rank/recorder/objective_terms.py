"""What an objective is made of, token by token, as a program shows it: sums that tell terms apart.

Of every microbatch a program shows how much each token weighs in the loss that its rank does
backward through, and the terms that are weighed: recorded log-probabilities, advantages, a gain, a
penalty. Of each term three sums are kept, over the tokens that weigh something: of its values, of
their squares, and of the values times a factor that depends on the label and on the token's place
among those of its sample. None of them depends on microbatches, ranks, or the side of the padding.
The third one differs if other tokens have the same values.

Of the weights there are the number of tokens that have one, their sum, and how uneven they are in
the whole step, in a rank, in a microbatch and in a sample. A mean over all tokens of the step gives
all of them one weight, a mean of means one in each part only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.run_folder import metrics

_LABEL, _PLACE = 1.7, 0.9
"""Any two numbers of which no small multiples agree with pi: the factor of a value is a cosine."""


class SumsOfTerm(NamedTuple):
    """Sums of one term over tokens that weigh something."""

    total: float = 0.0
    squares: float = 0.0
    mixed: float = 0.0
    """Of the values times the factors of their tokens."""
    trains: bool = False
    """Whether it depends on parameters, for autograd."""


class Shown(NamedTuple):
    """What a rank showed in a step."""

    tokens: int
    """Those that weigh something."""
    targets: int
    """Those that have a label."""
    samples: int
    """With a label."""
    microbatches: int
    weight: float
    """Sum of the weights."""
    ends: tuple[float, float]
    """The lowest and the highest weight that is not zero."""
    uneven: tuple[float, float]
    """How uneven weights are in the worst microbatch, and in the worst sample."""
    terms: Mapping[str, SumsOfTerm]
    """In the order in which the program names them."""


@dataclass(slots=True)
class TermSums:
    """The terms of one step that one rank has shown so far."""

    microbatches: list[Shown] = field(default_factory=list)

    @torch.no_grad()
    def add(
        self, weights: torch.Tensor, labels: torch.Tensor, values: Mapping[str, torch.Tensor]
    ) -> None:
        """Add a microbatch; waits for the device.

        Args:
            weights: shape (batch, …), zero for tokens that do not count.
            labels: of the same shape; -100 means no target.
            values: by name, each of the leading dimensions of ``weights``.
        """
        shape = weights.shape
        weights = weights.detach().double().reshape(len(weights), -1)
        labels = labels.reshape(weights.shape)
        counts = weights != 0
        factor = torch.cos(_LABEL * labels.double() + _PLACE * counts.cumsum(1).double())
        rows = [row[has] for row, has in zip(weights, counts, strict=True)]
        terms = {
            name: _sums(_over(value, shape)[counts], factor[counts], trains=value.requires_grad)
            for name, value in values.items()
        }
        has_label = labels != IGNORE_INDEX
        self.microbatches.append(
            Shown(
                tokens=int(counts.sum()),
                targets=int(has_label.sum()),
                samples=int(has_label.any(1).sum()),
                microbatches=1,
                weight=float(weights.sum()),
                ends=_ends(weights[counts]),
                uneven=(
                    spread(_ends(weights[counts])),
                    max((spread(_ends(row)) for row in rows), default=0.0),
                ),
                terms=terms,
            )
        )

    def take(self) -> Shown | None:
        """The sums of the step; None if nothing was shown."""
        return together(self.microbatches)


def _over(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A value for every token: shape (batch, tokens of a sample)."""
    ones = [1] * (len(shape) - value.ndim)
    whole = value.detach().double().reshape(*value.shape, *ones).expand(shape)
    return whole.reshape(len(whole), -1)


def _sums(values: torch.Tensor, factor: torch.Tensor, *, trains: bool) -> SumsOfTerm:
    total, squares, mixed = values.sum(), values.square().sum(), values @ factor
    return SumsOfTerm(float(total), float(squares), float(mixed), trains)


def _ends(weights: torch.Tensor) -> tuple[float, float]:
    """Infinities the wrong way around if there is none."""
    if not weights.numel():
        return math.inf, -math.inf
    return float(weights.min()), float(weights.max())


def spread(ends: tuple[float, float]) -> float:
    """How far apart weights are, as a share of the largest; 0 for none and for equal ones."""
    lowest, highest = ends
    return (highest - lowest) / max(abs(lowest), abs(highest)) if highest > lowest else 0.0


def together(parts: Sequence[Shown]) -> Shown | None:
    """Microbatches as one rank, or ranks as one; None without any."""
    if not parts:
        return None
    names = dict.fromkeys(name for part in parts for name in part.terms)
    return Shown(
        tokens=sum(part.tokens for part in parts),
        targets=sum(part.targets for part in parts),
        samples=sum(part.samples for part in parts),
        microbatches=sum(part.microbatches for part in parts),
        weight=math.fsum(part.weight for part in parts),
        ends=(min(part.ends[0] for part in parts), max(part.ends[1] for part in parts)),
        uneven=(max(part.uneven[0] for part in parts), max(part.uneven[1] for part in parts)),
        terms={
            name: _added([part.terms.get(name, SumsOfTerm()) for part in parts]) for name in names
        },
    )


def _added(parts: Sequence[SumsOfTerm]) -> SumsOfTerm:
    return SumsOfTerm(
        math.fsum(part.total for part in parts),
        math.fsum(part.squares for part in parts),
        math.fsum(part.mixed for part in parts),
        any(part.trains for part in parts),
    )


def terms_of(ranks: Sequence[Shown | None]) -> metrics.TermsDocument | None:
    """The line's part for a step; None if no rank showed anything.

    ``ranks``: one for every data-parallel coordinate.
    """
    some = [rank for rank in ranks if rank is not None]
    whole = together(some)
    if whole is None:
        return None
    microbatch, sample = whole.uneven
    return {
        "tokens": whole.tokens,
        "targets": whole.targets,
        "samples": whole.samples,
        "microbatches": max(rank.microbatches for rank in some),
        "weight": whole.weight / len(ranks),
        "uneven": {
            "step": spread(whole.ends),
            "rank": max(spread(rank.ends) for rank in some),
            "microbatch": microbatch,
            "sample": sample,
        },
        "sums": {
            name: {
                "total": term.total,
                "squares": term.squares,
                "mixed": term.mixed,
                "trains": term.trains,
            }
            for name, term in whole.terms.items()
        },
    }
