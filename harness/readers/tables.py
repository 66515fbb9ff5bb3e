"""JSONL and CSV files with one row per step as evidence."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.lines import fail, json_objects, number, step_number
from harness.readers.names import find_signals, find_step

Row = tuple[int, Mapping[str, Any]]
"""Line number in the file, and the values of the line."""


def read_jsonl(path: Path, text: str) -> Evidence:
    """One JSON object per line; lines without any known signal (validation, say) are left out.

    Raises EvidenceError naming file and line.
    """
    return _evidence(path, list(json_objects(path, text)))


def read_csv(path: Path, text: str) -> Evidence:
    """A table with a header line, separated by commas, semicolons or tabs.

    Raises EvidenceError naming file and line.
    """
    separator = max(",;\t", key=text.split("\n", 1)[0].count)
    # pandas would fill a short row up, and a row that was cut must not pass for one with gaps.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[Row] = []
    header: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
            elif len(cells) != len(header):
                fail(
                    path,
                    reader.line_num,
                    f"{len(cells)} cells, where the header has {len(header)}",
                )
            else:
                rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        fail(path, reader.line_num, f"not a table: {error}")
    return _evidence(path, rows)


def _evidence(path: Path, rows: Sequence[Row]) -> Evidence:
    if not rows:
        raise EvidenceError(f"{path}: holds no row of values")
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    found = find_signals(str(path), names)
    step = find_step(str(path), names)
    known = [
        (line, values) for line, values in rows if any(name in values for name in found.values())
    ]
    return Evidence(
        name=path.stem,
        source=str(path),
        steps=tuple(step_number(path, line, values.get(step)) for line, values in known),
        signals={
            signal: tuple(number(path, line, name, values.get(name)) for line, values in known)
            for signal, name in found.items()
        },
    )
