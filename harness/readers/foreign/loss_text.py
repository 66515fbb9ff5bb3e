"""Texts with a step and its loss per line, as torchtitan's own tests keep them.

``tests/assets/losses/*.txt`` of torchtitan: ``1 8.009735107421875 1.4477715492248535``, the values
of TensorBoard's float32 in full; a comment may name the columns, as ``# step loss grad_norm``.
"""

from __future__ import annotations

import re
from pathlib import Path

from converge_harness.model import Evidence
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import STEP, STEP_NAMES, Columns, candidates
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.lines import fail, line_of

DEFAULT_NAMES = (STEP, "loss", "grad_norm")
_ROW = re.compile(r"\d+(?:[ \t]+[-+.\w]+)+")


FORMAT = Format(
    "texts of steps and losses",
    read=lambda source: read_loss_text(source.path, source.text, source.columns),
    has_content=lambda source: is_loss_text(source.text),
)


def is_loss_text(text: str) -> bool:
    """Whether the first line that is no comment is a step and numbers, separated by spaces."""
    lines = (line.strip() for line in text.split("\n"))
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _ROW.fullmatch(first) is not None


def read_loss_text(path: Path, text: str, columns: Columns) -> Evidence:
    """One row per line: a step, its loss and perhaps its grad norm.

    Raises EvidenceError naming file and line.
    """
    place = line_of(path)
    rows = RowCollector(str(path), place, columns)
    names: tuple[str, ...] = ()
    wanted = candidates(columns)
    for line, content in enumerate(text.split("\n"), start=1):
        cells = content.split()
        if not cells:
            continue
        if cells[0].startswith("#"):
            words = content.strip().lstrip("#").split()
            if words and words[0] in STEP_NAMES and wanted.intersection(words[1:]):
                names = _header(place(line), words)
            continue
        names = names or DEFAULT_NAMES[: len(cells)]
        if len(cells) != len(names):
            fail(place(line), f"{len(cells)} values, where {' '.join(names)} should be")
        rows.add(line, dict(zip(names, cells, strict=True)))
    return rows.evidence(path.stem)


def _header(where: str, words: list[str]) -> tuple[str, ...]:
    for word in words:
        if words.count(word) > 1:
            fail(where, f"two columns have the name {word!r}; rename or drop one")
    return tuple(words)
