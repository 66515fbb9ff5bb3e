"""JSONL files, one row per line, as evidence."""

from __future__ import annotations

from pathlib import Path

from harness.model import Evidence
from harness.readers.lines import json_objects, line_of
from harness.readers.names import Columns
from harness.readers.rows import Rows


def read_jsonl(path: Path, text: str, columns: Columns) -> Evidence:
    """One JSON object per line; lines without a loss or grad norm (validation) are left out.

    Raises EvidenceError naming file and line.
    """
    rows = Rows(str(path), line_of(path), columns)
    for line, values in json_objects(path, text):
        rows.add(line, values)
    return rows.evidence(path.stem)
