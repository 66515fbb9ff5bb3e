"""What a signature of a bug is, and in which order signatures are asked.

A signature is a documented function of a :class:`converge_harness.judge.causes.context.Context`
that returns a :class:`Cause` where it recognises its class of bug, and None elsewhere. Several may
recognise one failure, so the first that does is believed. The order is a rule, and no place in a
list:

1. by :class:`Basis`: what the signature goes by, the most certain first;
2. of one basis, by :class:`Stage`: where in a step the bug is, in the order of the step, since what
   goes wrong early makes what comes later differ, too;
3. but a signature is asked before all that it ``overrides``, whatever their basis and stage.

Two of the same basis and stage have no order of their own, so one has to override the other:
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
    """What a person of the field would open first; empty when unknown."""


class Basis(IntEnum):
    """What a signature goes by, the most certain first."""

    RECORDED = 1
    """What a run itself records: its passes, its samples, numbers that are NaN, missing
    gradients."""
    HELD = 2
    """What ranks hold: copies of one shard, initial weights, buffers."""
    EXACT = 3
    """Other numbers that rounding does not change: counters, tables, the one factor of clipping."""
    FIRST_TENSORS = 4
    """Tensors and recomputed numbers of the first steps, or of frozen ones: nothing has had the
    time to grow."""
    FIRST_CURVES = 5
    """Curves at the first step."""
    LATER_STATE = 6
    """What later steps kept: restarts, counters, moments, weights that stand still."""
    LATER_CURVES = 7
    """How curves part after the first step."""
    LATER_TENSORS = 8
    """Sampled tensors of later steps."""
    LEFT_OVER = 9
    """Whatever nothing else recognised: it says when, and hardly why."""


class Stage(IntEnum):
    """Where in a run the bug is, in the order in which a step comes to it."""

    RUN = 0
    """No single place: a whole step, or the whole run."""
    RESUME = 1
    INPUT = 2
    WEIGHTS = 3
    """As training begins."""
    FORWARD = 4
    OBJECTIVE = 5
    REPORT = 6
    """The numbers that the trainer reports."""
    BACKWARD = 7
    CLIPPING = 8
    OPTIMIZER = 9
    UPDATE = 10
    BUFFERS = 11
    """State that no gradient drives, updated beside the optimizer."""


class ComparisonKind(Enum):
    """What is compared, which decides what a signature can go by."""

    ORDINARY = "the same training, step by step"
    CURVES = "two curves alone"
    """A grad norm shows one factor of wrong gradients at every step. Where they point, and whether
    the forward pass is right, it does not show."""
    DRAWING = "a set that draws random numbers of its own"
    """No single steps are compared. Its losses differ by what it draws, so they do not separate a
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
    """Make a documented function a :class:`Signature` of the name that it has."""

    def decorate(function: Recognise) -> Signature:
        if not function.__doc__:
            raise TypeError(f"signature {function.__name__} has no docstring")
        return Signature(function.__name__, basis, stage, overrides, asked_of, function)

    return decorate


def in_order(signatures: Iterable[Signature]) -> tuple[Signature, ...]:
    """The signatures by the rule of this module, whatever order they come in.

    Names that are not among them are overridden by nobody here. Raises ValueError for two of one
    basis and stage of which neither overrides the other, and for overrides in a circle.
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
