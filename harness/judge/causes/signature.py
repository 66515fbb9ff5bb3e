"""What a signature of a bug is, and in which order signatures are asked.

A signature is a documented function of a :class:`converge_harness.judge.causes.context.Context`
that returns a :class:`Cause` where it recognises its class of bug, and None elsewhere. Several may
recognise one failure, and the first one decides. The order follows from rules, and not from places
in a list:

1. by :class:`Basis`: the evidence that the signature uses, the most certain first;
2. with the same basis, by :class:`Stage`: where in a step the bug is, in the order of the step,
   because an early error makes everything later differ, too;
3. but a signature is asked before all that it ``overrides``, whatever their basis and stage.

Two with the same basis and stage have no order, so one has to override the other:
:func:`in_order` refuses a tie. A signature says so where it is defined, next to the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from converge_harness.judge.causes.context import Context
from converge_harness.model import CauseClass


class Cause(NamedTuple):
    """Why a test set got its verdict."""

    sentence: str = ""
    """With the numbers behind it; empty on PASS."""
    kind: CauseClass | None = None
    """None unless the judgement is FAIL."""
    look_at: str = ""
    """What an engineer would look at first; empty when unknown."""
    quoted: tuple[str, ...] = ()
    """Names of INVALID checks that the sentence already quotes, so nothing adds them as a note."""


class Basis(IntEnum):
    """The evidence that a signature uses, the most certain first."""

    RECORDED = 1
    """What a run itself records: its passes, its samples, numbers that are NaN, missing
    gradients."""
    HELD = 2
    """What ranks hold: copies of one shard, initial weights, buffers."""
    EXACT = 3
    """Other numbers that rounding does not change: counters, tables, the factor by which gradients
    were clipped."""
    FIRST_TENSORS = 4
    """Tensors and recomputed numbers of the first steps, or of frozen ones: differences have had no
    time to grow."""
    FIRST_CURVES = 5
    """Curves at the first step."""
    LATER_STATE = 6
    """State at later steps: restarts, counters, moments, weights that do not change."""
    LATER_CURVES = 7
    """How curves begin to differ after the first step."""
    LATER_TENSORS = 8
    """Sampled tensors of later steps."""
    LEFT_OVER = 9
    """For what nothing else recognised: it says when, but hardly why."""


class Stage(IntEnum):
    """Where in a run the bug is, in the order of a step."""

    RUN = 0
    """No single place: a whole step, or the whole run."""
    RESUME = 1
    INPUT = 2
    WEIGHTS = 3
    """Before the first step."""
    FORWARD = 4
    OBJECTIVE = 5
    REPORT = 6
    """The numbers that the trainer reports."""
    BACKWARD = 7
    CLIPPING = 8
    OPTIMIZER = 9
    UPDATE = 10
    BUFFERS = 11
    """State that is not updated by gradients, beside the optimizer."""


class ComparisonKind(Enum):
    """What is compared, which decides what evidence a signature can use."""

    ORDINARY = "the same training, step by step"
    CURVES = "two curves alone"
    """A grad norm shows one factor of wrong gradients at every step. It shows neither their
    direction nor whether the forward pass is correct."""
    DRAWING = "a set that draws random numbers of its own"
    """No single steps are compared. Its losses differ by random numbers, so they do not separate a
    forward from a backward fault."""


EVERY = tuple(ComparisonKind)

Recognise = Callable[[Context], Cause | None]


@dataclass(frozen=True, slots=True)
class Signature:
    """A function that recognises a class of bugs, with what decides when it is asked."""

    name: str
    basis: Basis
    stage: Stage
    overrides: tuple[str, ...]
    """Names of signatures that are only asked after it."""
    asked_of: tuple[ComparisonKind, ...]
    recognise: Recognise

    def __call__(self, context: Context) -> Cause | None:
        return self.recognise(context)


def signature(
    basis: Basis,
    stage: Stage,
    *,
    overrides: tuple[str, ...] = (),
    asked_of: tuple[ComparisonKind, ...] = (ComparisonKind.ORDINARY,),
) -> Callable[[Recognise], Signature]:
    """Make a documented function a :class:`Signature` with the function's name."""

    def decorate(function: Recognise) -> Signature:
        if not function.__doc__:
            raise TypeError(f"signature {function.__name__} has no docstring")
        return Signature(function.__name__, basis, stage, overrides, asked_of, function)

    return decorate


def in_order(signatures: Iterable[Signature]) -> tuple[Signature, ...]:
    """The signatures in the order of this module's rules, whatever order they are given in.

    Names in ``overrides`` that are not among them are ignored. Raises ValueError if two have the
    same basis and stage and neither overrides the other, and for overrides in a circle.
    """
    waiting = {each.name: each for each in signatures}
    found: list[Signature] = []
    while waiting:
        overridden = {name for each in waiting.values() for name in each.overrides}
        free = sorted(
            (each for each in waiting.values() if each.name not in overridden),
            key=lambda each: (each.basis, each.stage),
        )
        if not free:
            raise ValueError(f"overrides in a circle: {', '.join(sorted(waiting))}")
        first = free[0]
        tied = [
            each.name for each in free if (each.basis, each.stage) == (first.basis, first.stage)
        ]
        if len(tied) > 1:
            raise ValueError(f"{' and '.join(sorted(tied))} have no order: one has to override")
        found.append(waiting.pop(first.name))
    return tuple(found)
