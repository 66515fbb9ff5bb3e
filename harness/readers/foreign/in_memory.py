"""Columns in memory (arrays, lists, a frame) as evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import Column, Evidence, Integers
from converge_harness.readers.foreign.names import (
    STEP,
    Columns,
    check_columns,
    find_signals,
    find_step,
    overlooked,
)
from converge_harness.readers.foreign.printed_digits import digits_of, printed_with
from converge_harness.readers.points import Points, last_values


def read_table(
    name: str,
    table: Mapping[str, Sequence[Any]],
    columns: Columns,
    *,
    since: int | None = None,
    count_from_1: bool = False,
) -> Evidence:
    """A curve named ``name`` from columns of equal length, one of them the steps.

    ``since`` and ``count_from_1`` as for ``read_curves``.

    The rules are those for files: of a step that occurs twice the last value counts and the
    evidence says so; NaN is a value that the run had; None and ``pandas.NA`` are missing values.

    Raises EvidenceError naming column and row.
    """
    check_columns(columns)
    names = list(table)
    wanted = {STEP: find_step(name, names, columns), **find_signals(name, names, columns)}
    lengths = {column: len(table[column]) for column in wanted.values()}
    if len(set(lengths.values())) > 1:
        lengths_text = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise EvidenceError(f"{name}: its columns have different lengths: {lengths_text}")
    steps = _steps(name, wanted[STEP], table[wanted[STEP]])
    from_0 = count_from_1 and bool(steps.size) and int(steps.min()) == 0
    steps = steps + 1 if from_0 else steps
    kept = np.ones(steps.size, dtype=np.bool_) if since is None else steps >= since
    if not kept.any():
        why = f"has no step from {since} on" if steps.size else "has no row"
        raise EvidenceError(f"{name}: {why}")
    signals, digits = {}, {}
    for signal, column in wanted.items():
        if signal == STEP:
            continue
        values = [_number(name, column, row, each) for row, each in enumerate(table[column])]
        whole = Column.of(values)
        signals[signal] = Points(steps[kept], Column(whole.values[kept], whole.present[kept]))
        digits[signal] = digits_of(values)
    found = {signal: column for signal, column in wanted.items() if signal != STEP}
    others = overlooked((each for each in names if _begins(table[each])), found)
    read = last_values(signals).evidence(
        name, source=name, overlooked=others, counted_from_1=from_0
    )
    return printed_with(read, digits)


def _begins(values: Sequence[Any]) -> bool:
    """Whether the first value of a column is a number."""
    first = values[0] if len(values) else None
    return isinstance(first, int | float | np.number) and not isinstance(first, bool)


def _steps(name: str, column: str, values: Sequence[Any]) -> Integers:
    steps = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        number = _number(name, column, row, value)
        if number is None or not (0 <= number <= 2**53 and number.is_integer()):
            raise EvidenceError(
                f"{name}: row {row}: {column} is {value!r}, not a step (a whole number from 0)"
            )
        steps[row] = int(number)
    return steps


def _number(name: str, column: str, row: int, value: Any) -> float | None:
    """A cell as a number; None if it has no value."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_ | str | bytes):
        raise EvidenceError(f"{name}: row {row}: {column} is {value!r}, which is not a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    if type(value).__name__ in ("NAType", "NaTType"):  # without importing pandas
        return None
    raise EvidenceError(f"{name}: row {row}: {column} is {value!r}, which is not a number")
