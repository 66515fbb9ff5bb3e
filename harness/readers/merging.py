"""Passes of one run to the one curve that they make.

A step belongs to the last pass that trained it, and what a resume went back behind is no part of
the final state: so each pass takes away all steps after the checkpoint that it started from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from harness.model import Column, Evidence, Flags, Floats, Integers, ReplicaSample, TensorSample
from harness.readers.passes import Life

T = TypeVar("T")
Sample = TypeVar("Sample", TensorSample, ReplicaSample)


class _Part(NamedTuple):
    """What the final state owes to a pass."""

    life: Life
    kept: Flags
    """Shape (steps of the pass,)."""

    @property
    def steps(self) -> Integers:
        return self.life.itself.steps[self.kept]

    @property
    def owned(self) -> frozenset[int]:
        """Its steps; 0 too, when it started from the seed checkpoint."""
        first = {0} if not self.life.itself.loaded_step else set()
        return frozenset(first | set(self.steps.tolist()))


def merge(lives: Sequence[Life], last_step: int | None, **more: Any) -> Evidence:
    """One run's evidence from its passes, at least one, in the order of their starts.

    ``last_step`` is the job's: the run is complete when its last pass was meant to end there, and
    did. A pass that made no step takes none away. ``more`` are further fields of ``Evidence``.
    """
    parts = _parts(lives)
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps)

    def in_order(values: Callable[[Life], Iterable[T]]) -> tuple[T, ...]:
        found = [
            value
            for part in parts
            for value, keep in zip(values(part.life), part.kept.tolist(), strict=True)
            if keep
        ]
        return tuple(found[place] for place in order.tolist())

    signals = {signal: None for life in lives for signal in life.itself.signals}
    missing = (
        name
        for part in parts
        for step, name in part.life.metrics.grads_missing
        if step in part.owned
    )
    end = lives[-1].metrics.end
    return Evidence(
        steps=steps[order],
        signals={signal: _column(signal, parts, order) for signal in signals},
        batch_digests=in_order(lambda life: life.metrics.batch_digests),
        batch_agrees=in_order(lambda life: life.metrics.batch_agrees),
        in_force=next((life.itself.in_force for life in lives if life.itself.in_force), None),
        complete=end is not None and end == last_step,
        expected_steps=last_step,
        grads_missing=tuple(dict.fromkeys(missing)),
        samples=_latest((part, part.life.samples) for part in parts),
        replicas=_latest((part, part.life.metrics.replicas) for part in parts),
        problems=tuple(dict.fromkeys(sentence for part in parts for sentence in _problems(part))),
        replayed=_replayed(lives),
        replay_conflicts=tuple(clause for life in lives for clause in _twice(life)),
        passes=tuple(life.itself for life in lives),
        **more,
    )


def _parts(lives: Sequence[Life]) -> list[_Part]:
    """The passes with the steps of each that no later one went back behind or trained again."""
    parts = []
    for index, life in enumerate(lives):
        steps = life.itself.steps
        kept = np.ones(steps.size, dtype=np.bool_)
        for later in (other.itself for other in lives[index + 1 :]):
            if later.steps.size:
                start = int(later.steps[0]) - 1 if later.loaded_step is None else later.loaded_step
                kept &= (steps <= start) & ~np.isin(steps, later.steps)
        parts.append(_Part(life, kept))
    return parts


def _column(signal: str, parts: Sequence[_Part], order: Integers) -> Column:
    """A signal of the kept steps, with holes where a pass has none of it."""
    values: list[Floats] = []
    present: list[Flags] = []
    for part in parts:
        column = part.life.itself.signals.get(signal)
        if column is None:
            values.append(np.full(part.steps.size, np.nan))
            present.append(np.zeros(part.steps.size, dtype=np.bool_))
        else:
            values.append(column.values[part.kept])
            present.append(column.present[part.kept])
    return Column(np.concatenate(values)[order], np.concatenate(present)[order])


def _latest(taken: Iterable[tuple[_Part, Sequence[Sample]]]) -> tuple[Sample, ...]:
    """The samples of the steps that each pass owns, in order."""
    found: dict[int, Sample] = {}
    for part, samples in taken:
        found |= {sample.step: sample for sample in samples if sample.step in part.owned}
    return tuple(found[step] for step in sorted(found))


def _problems(part: _Part) -> Iterator[str]:
    """What the probe could not measure in the kept steps, and what is odd about the pass."""
    number = part.life.itself.number
    yield from (f"pass {number}: {sentence}" for sentence in part.life.metrics.settled.problems)
    for step, sentence in part.life.metrics.problems:
        if step in part.owned:
            yield f"step {step}: {sentence}"


def _replayed(lives: Sequence[Life]) -> tuple[int, ...]:
    """Steps that more than one pass has."""
    steps, counts = np.unique(
        np.concatenate([life.itself.steps for life in lives]), return_counts=True
    )
    return tuple(steps[counts > 1].tolist())


def _twice(life: Life) -> Iterator[str]:
    """Steps that one pass has twice: no restart replays those."""
    for step in life.metrics.settled.replayed:
        words = life.metrics.settled.differences.get(step, ("of the same values",))
        yield f"step {step} twice in pass {life.itself.number}: {', and '.join(words)}"
