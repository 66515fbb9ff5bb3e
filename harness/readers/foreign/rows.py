"""Collects rows of named values, as loggers write them, as evidence."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from converge_harness.model import JUDGED_SIGNALS, Evidence
from converge_harness.readers.foreign.names import (
    Columns,
    candidates,
    find_signals,
    find_step,
    overlooked,
)
from converge_harness.readers.foreign.printed_digits import Digits, digits_of, printed_with
from converge_harness.readers.lines import NoRowError, Place, numbers, step_numbers
from converge_harness.readers.points import Points, last_values

CURVES = JUDGED_SIGNALS
"""A row with one of these is a row of training; one with only a learning rate is ignored."""


@dataclass(slots=True)
class _Cells:
    """The values of one name, and their rows."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: list[Any] = field(default_factory=list)


class RowCollector:
    """Takes row after row and keeps only what may be a step or a signal."""

    def __init__(self, where: str, place: Place, columns: Columns) -> None:
        self._where = where
        self._place = place
        self._columns = columns
        self._wanted = candidates(columns)
        self._names: dict[str, int] = {}
        """By name, the number of rows in which it has a number."""
        self._numbers = array("q")
        self._cells: dict[str, _Cells] = {}

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Add a row; its number in the file (such as the line) is for messages."""
        row = len(self._numbers)
        self._numbers.append(number)
        for name in values:
            if name in self._wanted:
                cells = self._cells.setdefault(name, _Cells())
                cells.rows.append(row)
                cells.values.append(values[name])
            self._names[name] = self._names.get(name, 0) + (type(values[name]) in (int, float))

    def evidence(self, name: str, *, grid: Collection[str] = CURVES, **more: Any) -> Evidence:
        """The rows as evidence; ``grid`` as for ``last_values``, ``more`` are fields of Evidence.

        Raises EvidenceError when there is no row, no loss or no step, and for a value that is not
        a number.
        """
        if not self._numbers:
            raise NoRowError(f"{self._where}: has no row of values")
        found = find_signals(self._where, self._names, self._columns)
        steps = self._cells[find_step(self._where, self._names, self._columns)]
        step_of: list[Any] = [None] * len(self._numbers)
        for row, value in zip(steps.rows, steps.values, strict=True):
            step_of[row] = value
        points: dict[str, Points] = {}
        digits: dict[str, Digits] = {}
        for signal, label in found.items():
            cells = self._cells[label]
            lines = np.asarray(self._numbers)[np.asarray(cells.rows)].tolist()
            points[signal] = Points(
                step_numbers(self._place, lines, [step_of[row] for row in cells.rows]),
                numbers(self._place, lines, label, cells.values),
            )
            digits[signal] = digits_of(cells.values)
        values = last_values(points, grid=grid)
        # One value for a whole run, as in a summary at the end of a log, is no curve.
        often = len(self._cells[found["loss"]].rows) / 2
        curves = [each for each, count in self._names.items() if count >= often]
        read = {"source": self._where, "overlooked": overlooked(curves, found), **more}
        return printed_with(values.evidence(name, **read), digits)
