"""CSV files with one row per step as evidence.

pandas reads a large file in blocks, after counting separators to check that every row is complete
(pandas would fill up a short one). If anything is unusual (quotes, empty cells, text instead of a
number), the csv module reads the file again, row by row, and errors name the line. It also reads
small files, since importing pandas takes longer than that.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import Column, Evidence, Floats, Integers
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import (
    STEP,
    Columns,
    candidates,
    find_signals,
    find_step,
    overlooked,
)
from converge_harness.readers.foreign.printed_digits import (
    NO_DIGITS,
    Digits,
    digits_of,
    printed_with,
)
from converge_harness.readers.lines import (
    NoRowError,
    fail,
    line_of,
    numbers,
    read_text,
    step_numbers,
)
from converge_harness.readers.points import Points, last_values

SEPARATORS = ",;\t"
FAST_FROM = 1 << 20
"""Bytes from which reading with pandas is faster."""
BLOCK = 1 << 23
"""Bytes that are in memory as text at a time."""
ROWS = 1 << 16
EXACT_STEPS = 2.0**53


@dataclass(frozen=True, slots=True)
class _Header:
    """The first non-blank line, and the columns that are read."""

    names: tuple[str, ...]
    separator: str
    line: int
    """Its line number, from 1."""
    places: Mapping[str, int]
    """``step`` and the signals, to the indices of their columns."""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The columns that are read, in the order of the file."""

    steps: Integers
    signals: dict[str, Column]
    digits: dict[str, Digits]
    """The printed digits of the signals."""
    overlooked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """As :class:`Evidence` has it."""


FORMAT = Format(
    "CSV",
    read=lambda source: read_csv(source.path, source.columns, unfinished=source.unfinished),
    has_name=lambda path: path.suffix in (".csv", ".tsv"),
    has_content=lambda source: is_csv(source.text, source.columns),
)


def is_csv(text: str, columns: Columns) -> bool:
    """Whether the first line names at least one column that may be a step or a signal."""
    cells = re.split(f"[{SEPARATORS}]", text.lstrip().split("\n", 1)[0])
    names = {cell.strip().strip('"') for cell in cells}
    return len(cells) > 1 and bool(names & candidates(columns))


def read_csv(path: Path, columns: Columns, *, unfinished: bool = False) -> Evidence:
    """A table with a header line, separated by commas, semicolons or tabs.

    ``unfinished`` as for ``Source``. Raises EvidenceError naming file and line.
    """
    try:
        with _opened(path, unfinished=unfinished) as stream:
            header = _read_header(path, stream, columns)
            is_large = not unfinished and path.stat().st_size >= FAST_FROM
            table = _read_fast(path, header) if is_large else None
            table = table or _read_precisely(path, stream, header)
        if not unfinished:
            with _opened(path, unfinished=False) as stream:
                table = replace(table, overlooked=_overlooked(path, stream, header))
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        read_text(path)  # names the byte; a stream knows its position in a block only
        raise
    if not table.steps.size:
        raise NoRowError(f"{path}: has no row of values")
    points = {name: Points(table.steps, column) for name, column in table.signals.items()}
    read = last_values(points).evidence(path.stem, source=str(path), overlooked=table.overlooked)
    return printed_with(read, table.digits)


def _opened(path: Path, *, unfinished: bool) -> TextIO:
    if unfinished:
        return io.StringIO(read_text(path, whole_lines=True), newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_header(path: Path, stream: TextIO, columns: Columns) -> _Header:
    """The first line that is not blank; the stream is then behind it."""
    line, text = next(
        ((line, text) for line, text in enumerate(stream, 1) if text.strip()), (0, "")
    )
    if not text:
        raise NoRowError(f"{path}: is empty")
    separator = max(SEPARATORS, key=text.count)
    try:
        cells = next(csv.reader([text], delimiter=separator, strict=True), [])
    except csv.Error as error:
        fail(line_of(path)(line), f"not a table: {error}")
    names = [cell.strip() for cell in cells]
    twice = [name for name in dict.fromkeys(names) if name and names.count(name) > 1]
    if twice:
        fail(line_of(path)(line), f"two columns have the name {twice[0]!r}; rename or drop one")
    wanted = {STEP: find_step(str(path), names, columns)}
    wanted |= find_signals(str(path), names, columns)
    places = {signal: names.index(name) for signal, name in wanted.items()}
    return _Header(tuple(names), separator, line, places)


def _overlooked(path: Path, stream: TextIO, header: _Header) -> dict[str, tuple[str, ...]]:
    """Columns that may be a signal by their name and first value, and are not read."""
    rows = itertools.islice(stream, header.line, None)
    _, first = next(_rows(path, rows, header), (0, ()))
    is_number = dict(zip(header.names, map(_is_number, first), strict=False))
    found = {signal: header.names[at] for signal, at in header.places.items()}
    return overlooked((name for name in header.names if is_number.get(name)), found)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# ------------------------------------------------------------------ precisely


def _read_precisely(path: Path, stream: TextIO, header: _Header) -> _Table:
    steps: list[Integers] = []
    signals: dict[str, list[Column]] = {signal: [] for signal in header.places if signal != STEP}
    digits = dict.fromkeys(signals, NO_DIGITS)
    rows = _rows(path, stream, header)
    while block := list(itertools.islice(rows, ROWS)):
        lines = [line for line, _ in block]
        for signal, at in header.places.items():
            cells = [row[at] for _, row in block]
            if signal == STEP:
                steps.append(step_numbers(line_of(path), lines, cells))
            else:
                signals[signal].append(numbers(line_of(path), lines, header.names[at], cells))
                digits[signal] = digits[signal].most(digits_of(cells))
    return _joined(steps, signals, digits)


def _rows(path: Path, stream: Iterable[str], header: _Header) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row that is not blank."""
    # A truncated row must not be taken for one with empty cells.
    reader = csv.reader(stream, delimiter=header.separator, strict=True)
    width = len(header.names)
    try:
        for cells in reader:
            line = header.line + reader.line_num
            if len(cells) == width and cells[0]:
                yield line, cells
            elif any(cell.strip() for cell in cells):
                if len(cells) != width:
                    fail(line_of(path)(line), f"{len(cells)} cells, where the header has {width}")
                yield line, cells
    except csv.Error as error:
        fail(line_of(path)(header.line + reader.line_num), f"not a table: {error}")


# ----------------------------------------------------------------------- fast


def _read_fast(path: Path, header: _Header) -> _Table | None:
    """The table; None if it has anything that only reading row by row can judge."""
    if header.line != 1 or '"' in "".join(header.names):
        return None
    steps: list[Integers] = []
    signals: dict[str, list[Column]] = {signal: [] for signal in header.places if signal != STEP}
    digits = dict.fromkeys(signals, NO_DIGITS)
    with path.open("rb") as stream:
        stream.readline()
        for block in _blocks(stream):
            parsed = _parse(block, header)
            if parsed is None:
                return None
            values, shown = parsed
            step = values[STEP]
            if not ((step >= 0) & (step <= EXACT_STEPS) & (step == np.floor(step))).all():
                return None
            steps.append(step.astype(np.int64))
            for signal, columns in signals.items():
                columns.append(Column.of(values[signal]))
                digits[signal] = digits[signal].most(shown[signal])
    return _joined(steps, signals, digits)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines, about ``BLOCK`` bytes at a time, each ending in a newline."""
    rest = b""
    while block := stream.read(BLOCK):
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = block[end:]
        else:
            rest += block
    if rest:
        yield rest + b"\n"


def _parse(block: bytes, header: _Header) -> tuple[dict[str, Floats], dict[str, Digits]] | None:
    """The columns of complete, plain rows, and their digits; None if any row is not."""
    from pandas import read_csv  # noqa: PLC0415

    block = block.replace(b"\r\n", b"\n")
    # pandas ends a cell at a NUL.
    if not block.isascii() or any(byte in block for byte in (b"\r", b'"', b"\0")):
        return None
    content = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(content == ord("\n"))
    separators = np.flatnonzero(content == ord(header.separator))
    per_row = np.diff(np.searchsorted(separators, ends), prepend=0)
    width = len(header.names)
    if not (per_row == width - 1).all():
        return None
    table = read_csv(
        io.BytesIO(block),
        sep=header.separator,
        header=None,
        usecols=sorted(set(header.places.values())),
        dtype=str,  # as printed: the number of digits matters, too
        na_filter=False,
        quoting=csv.QUOTE_NONE,
        skip_blank_lines=False,
    )
    values: dict[str, Floats] = {}
    digits: dict[str, Digits] = {}
    for signal, at in header.places.items():
        column = table[at].tolist()
        if "_" in "".join(column):
            return None
        try:
            values[signal] = np.fromiter(map(float, column), np.float64, ends.size)
        except ValueError:
            return None
        if signal != STEP:
            digits[signal] = digits_of(column)
    return values, digits


def _joined(
    steps: list[Integers], signals: Mapping[str, list[Column]], digits: dict[str, Digits]
) -> _Table:
    """Blocks one after the other."""
    if not steps:
        return _Table(np.zeros(0, dtype=np.int64), {}, {})
    return _Table(
        np.concatenate(steps),
        {
            signal: Column(
                np.concatenate([column.values for column in columns]),  # noqa: PD011
                np.concatenate([column.present for column in columns]),
            )
            for signal, columns in signals.items()
        },
        digits,
    )
