"""The points of each signal in a source, and the last value of each at every step.

A restart replays steps from its checkpoint on, and loggers write several rows per step. Of several
values at one step the last counts; if an earlier one differs from it, the evidence says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from converge_harness.model import Column, Evidence, Flags, Floats, Integers, ReplayConflict

MEASURED_ANEW = frozenset({"seconds", "at", "memory_bytes"})
"""Signals that differ in every replay of a step, which is no conflict."""


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """One signal in the order of its source, where steps may repeat and go back."""

    steps: Integers
    """Shape (points,)."""
    column: Column
    """Shape (points,); a missing value is a step that the source names without one."""


@dataclass(frozen=True, slots=True, eq=False)
class LastValues:
    """The signals with every step once, in order."""

    steps: Integers
    signals: dict[str, Column]
    replayed: tuple[int, ...]
    differences: Mapping[int, tuple[str, ...]]
    """By replayed step whose values differ, what differs: ``loss 5.1, then 5.2``."""
    problems: tuple[str, ...]
    """Sentences on steps that were out of order."""

    def evidence(
        self, name: str, *, source: str, problems: tuple[str, ...] = (), **more: Any
    ) -> Evidence:
        """Evidence with these steps and signals; ``more`` are further fields of it."""
        return Evidence(
            name=name,
            source=source,
            steps=self.steps,
            signals=self.signals,
            replayed=self.replayed,
            replay_conflicts=_conflicts(self.differences),
            problems=(*self.problems, *problems),
            **more,
        )


def last_values(
    points: Mapping[str, Points],
    *,
    grid: Collection[str] = (),
    spell: Mapping[str, Callable[[float], str]] | None = None,
) -> LastValues:
    """Every step once, increasing, with each signal's last value.

    ``grid`` names the signals that determine the steps (empty: all); points of others at other
    steps are left out. ``spell`` formats a signal's values in clauses. Values agree when they are
    equal, or both NaN.
    """
    singles = {name: _last_of_one(each) for name, each in points.items()}
    steps = np.zeros(0, dtype=np.int64)
    for name, single in singles.items():
        # Usually all signals have the same steps, and a union of a million steps takes time.
        if (not grid or name in grid) and not np.array_equal(steps, single.steps):
            steps = np.union1d(steps, single.steps) if steps.size else single.steps
    repeated: set[int] = set()
    clauses: dict[int, list[str]] = {}
    late: dict[int, int] = {}
    for name, single in singles.items():
        if name in MEASURED_ANEW:
            continue
        repeated.update(single.repeated.tolist())
        late |= single.late
        show = (spell or {}).get(name, repr)
        for step, first, other in single.conflicts:
            clauses.setdefault(step, []).append(f"{name} {show(first)}, then {show(other)}")
    here = set(steps[np.isin(steps, list({*repeated, *clauses, *late}))].tolist())
    return LastValues(
        steps=steps,
        signals={name: single.at(steps) for name, single in singles.items()},
        replayed=tuple(sorted(repeated & here)),
        differences={step: tuple(clauses[step]) for step in here & clauses.keys()},
        problems=_out_of_order({step: late[step] for step in sorted(here & late.keys())}),
    )


def _conflicts(differences: Mapping[int, tuple[str, ...]]) -> tuple[ReplayConflict, ...]:
    """One for each step."""
    ordered = sorted(differences.items())
    return tuple(ReplayConflict(step, ", and ".join(values)) for step, values in ordered)


def _out_of_order(late: Mapping[int, int]) -> tuple[str, ...]:
    """A sentence when steps that occur once come after later ones."""
    if not late:
        return ()
    step, before = next(iter(late.items()))
    others = f" and {len(late) - 1} more" if len(late) > 1 else ""
    sentence = (
        f"the order of steps in the source is not increasing: step {step}{others} comes after "
        f"step {before}; they were sorted"
    )
    return (sentence,)


@dataclass(frozen=True, slots=True, eq=False)
class _Single:
    """The last values of one signal."""

    steps: Integers
    column: Column
    repeated: Integers
    """Steps with more than one value."""
    conflicts: tuple[tuple[int, float, float], ...]
    """Step, first value, and the last value that differs from it."""
    late: Mapping[int, int]
    """Steps first seen after a later step, to that step."""

    def at(self, steps: Integers) -> Column:
        """The signal on other steps, with missing values where it has none."""
        if np.array_equal(steps, self.steps):
            return self.column
        places = np.searchsorted(self.steps, steps)
        places[places == self.steps.size] = 0
        present = np.zeros(steps.size, dtype=np.bool_)
        values = np.full(steps.size, np.nan)
        if self.steps.size:
            present = (self.steps[places] == steps) & self.column.present[places]
            values[present] = self.column.values[places[present]]
        return Column(values, present)


_NONE = np.zeros(0, dtype=np.int64)


def _last_of_one(points: Points) -> _Single:
    if (np.diff(points.steps) > 0).all():
        return _Single(points.steps, points.column, _NONE, (), {})
    order = np.argsort(points.steps, kind="stable")
    steps = points.steps[order]
    values, present = points.column.values[order], points.column.present[order]
    opens = np.flatnonzero(np.diff(steps, prepend=steps[0] - 1))
    where = np.arange(steps.size)
    first = np.minimum.reduceat(np.where(present, where, steps.size), opens)
    last = np.maximum.reduceat(np.where(present, where, -1), opens)
    there = last >= 0
    group = np.repeat(np.arange(opens.size), np.diff(opens, append=steps.size))
    base = values[np.minimum(first, steps.size - 1)][group]
    differs = present & ~_agree(values, base)
    other = np.maximum.reduceat(np.where(differs, where, -1), opens)
    conflicts = [
        (int(steps[at]), float(values[first[of]]), float(values[at]))
        for of, at in enumerate(other.tolist())
        if at >= 0
    ]
    peak = np.maximum.accumulate(points.steps)
    firsts = order[opens]
    behind = firsts[points.steps[firsts] < peak[firsts]]
    return _Single(
        steps=steps[opens],
        column=Column(np.where(there, values[last], np.nan), there),
        repeated=steps[opens][np.add.reduceat(present, opens, dtype=np.int64) > 1],
        conflicts=tuple(conflicts),
        late={int(points.steps[at]): int(peak[at]) for at in behind.tolist()},
    )


def _agree(values: Floats, others: Floats) -> Flags:
    return np.equal(values, others) | (np.isnan(values) & np.isnan(others))
