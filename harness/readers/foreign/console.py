"""Torchtitan's console log as evidence: rounded to five (loss) and four (grad norm) decimals."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from converge_harness.errors import EvidenceError
from converge_harness.model import Column, Evidence
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.printed_digits import half_unit
from converge_harness.readers.lines import fail, line_of, number_at, step_number
from converge_harness.readers.points import Points, last_values

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"(?<!validate )step:\s*(?P<step>\d+)\s+loss:")
_VALUES = re.compile(
    # Logs from before June 2025 have no grad norm: memory comes next.
    r"step:\s*\d+\s+loss:\s*(?P<loss>\S+)\s+(?:grad_norm:\s*(?P<grad_norm>\S+)|memory:)"
)
_RANK = re.compile(r"^\[(?:rank|default)(\d+)\]:")
NO_LOSS = -1.0
"""The loss that a rank without the last pipeline stage prints."""


FORMAT = Format(
    "torchtitan's console logs",
    read=lambda source: read_console(source.path, source.text),
    has_content=lambda source: is_console(source.text),
)


def is_console(text: str) -> bool:
    """Whether a text has a line of torchtitan's training metrics."""
    return _STEP.search(_COLOUR.sub("", text)) is not None


def read_console(path: Path, text: str) -> Evidence:
    """Loss and grad norm of each logged step, with the number of printed digits.

    Raises EvidenceError for a line that is cut or garbled, when several ranks' lines are mixed,
    and for the log of a rank that computes no loss.
    """
    place = line_of(path)
    steps: list[int] = []
    columns: dict[str, list[float | None]] = {"loss": [], "grad_norm": []}
    rounding = dict.fromkeys(columns, 0.0)
    ranks: set[str] = set()
    for line, coloured in enumerate(text.split("\n"), start=1):
        content = _COLOUR.sub("", coloured)
        step = _STEP.search(content)
        if step is None:
            continue
        values = _VALUES.search(content, step.start())
        if values is None:
            fail(place(line), f"a step without its loss and grad norm: {content.strip()[-80:]!r}")
        steps.append(step_number(place, line, step["step"]))
        for signal, column in columns.items():
            printed = (values[signal] or "").replace(",", "")
            column.append(number_at(place, line, signal, printed))
            if "." in printed:  # NaN has no digits
                places = len(printed.partition(".")[2])
                rounding[signal] = max(rounding[signal], half_unit(places))
        rank = _RANK.match(content)
        ranks.add(rank[1] if rank else "")
    if len(ranks) > 1:
        raise EvidenceError(
            f"{path}: steps of several ranks ({', '.join(sorted(filter(None, ranks)))}) are mixed; "
            "give the log of one rank"
        )
    if set(columns["loss"]) == {NO_LOSS}:
        raise EvidenceError(
            f"{path}: every loss is {NO_LOSS}, which a rank without the last pipeline stage "
            "prints; give the log of a rank that has it"
        )
    points = {
        signal: Points(np.array(steps, dtype=np.int64), Column.of(column))
        for signal, column in columns.items()
        if set(column) != {None}
    }
    return last_values(points).evidence(
        path.stem,
        source=str(path),
        rounding={signal: rounding[signal] for signal in points},
    )
