"""The model as a tree, with what modules computed in the first batches beside the control's; pure.

The way to the first wrong module is shown in full. Every other module is one row, with the worst
value inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from converge_harness.judge import ModuleComparison, ModuleDifference
from converge_harness.report.sanitize import plain


class Damage(StrEnum):
    """How a module compares with the control's."""

    NONE = "right"
    FIRST = "wrong first"
    AROUND = "contains it"
    AFTER = "wrong, too"


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module, or several that follow each other and compare alike."""

    label: str
    """Its own name, or the first and last of several: ``0 to 3``."""
    depth: int
    damage: Damage
    output: ModuleDifference | None
    """The worst of what it and its modules get and give; None if nothing was compared."""
    gradient: ModuleDifference | None
    """The same of gradients."""


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The rows in the order of the calls."""

    rows: tuple[ModuleRow, ...]
    """Empty if no module is wrong, or the set did not fail by the forward or backward pass."""
    modules: int
    """How many modules were compared."""
    furthest: ModuleDifference
    """Of all tensors and gradients the one that is furthest off, in multiples of its noise."""
    not_compared: tuple[str, ...] = ()
    """Modules none of whose tensors has values that can be compared in both runs."""


def module_tree(
    compared: ModuleComparison | None, first: str, *, failed: bool
) -> ModuleTree | None:
    """The tree of a set; None if no modules were compared.

    ``first`` is the name of a failed set's first wrong module; ``failed``: the cause was
    sought among modules.
    """
    every = () if compared is None else (*compared.forward, *compared.backward)
    if compared is None or not every:
        return None
    names = list(dict.fromkeys(each.row.module for each in compared.forward))
    furthest = max(every, key=attrgetter("multiple"))
    left = tuple(map(plain, compared.not_compared))
    if not failed or compared.first_off is None:
        return ModuleTree((), len(names), furthest, left)
    rows = _joined(list(_rows(compared, names, "", 0, first)))
    return ModuleTree(tuple(rows), len(names), furthest, left)


def _rows(
    compared: ModuleComparison, names: Sequence[str], above: str, depth: int, first: str
) -> Iterator[ModuleRow]:
    parts = dict.fromkeys(name.removeprefix(above).split(".")[0] for name in names)
    for part in parts:
        path = above + part
        inside = [name for name in names if f"{name}.".startswith(f"{path}.")]
        on_the_way = f"{first}.".startswith(f"{path}.")
        output, gradient = (_worst(rows, path) for rows in (compared.forward, compared.backward))
        off = any(each is not None and each.is_off for each in (output, gradient))
        damage = Damage.AFTER if off else Damage.NONE
        if on_the_way:
            damage = Damage.FIRST if path == first else Damage.AROUND
        yield ModuleRow(plain(part), depth, damage, output, gradient)
        below = [name for name in inside if name != path]
        if on_the_way and below:
            yield from _rows(compared, below, f"{path}.", depth + 1, first)


def _worst(rows: Sequence[ModuleDifference], path: str) -> ModuleDifference | None:
    """Of a module and all in it, in multiples of noise."""
    inside = [each for each in rows if f"{each.row.module}.".startswith(f"{path}.")]
    return max(inside, key=attrgetter("multiple"), default=None)


def _joined(rows: Sequence[ModuleRow]) -> Iterator[ModuleRow]:
    """The rows; numbered layers that follow each other and compare alike are one."""
    waiting: list[ModuleRow] = []
    for row in rows:
        numbered = row.label.isdecimal() and row.damage in (Damage.NONE, Damage.AFTER)
        follows = waiting and (row.depth, row.damage) == (waiting[-1].depth, waiting[-1].damage)
        if not (numbered and follows):
            yield from _as_one(waiting)
            waiting = []
        if numbered:
            waiting.append(row)
        else:
            yield row
    yield from _as_one(waiting)


def _as_one(rows: Sequence[ModuleRow]) -> Iterator[ModuleRow]:
    if not rows:
        return
    outputs = [row.output for row in rows if row.output]
    gradients = [row.gradient for row in rows if row.gradient]
    label = rows[0].label if len(rows) == 1 else f"{rows[0].label} to {rows[-1].label}"
    output, gradient = (
        max(some, key=attrgetter("multiple"), default=None) for some in (outputs, gradients)
    )
    yield ModuleRow(label, rows[0].depth, rows[0].damage, output, gradient)
