"""Torchtitan's console log as evidence: rounded to five (loss) and four (grad norm) decimals."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.lines import fail, number

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"(?<!validate )step:\s*(?P<step>\d+)\s+loss:")
_VALUES = re.compile(r"step:\s*\d+\s+loss:\s*(?P<loss>\S+)\s+grad_norm:\s*(?P<grad_norm>\S+)")
_RANK = re.compile(r"^\[(?:rank|default)(\d+)\]:")


def is_console(text: str) -> bool:
    """Whether a text has a line of torchtitan's training metrics."""
    return _STEP.search(_COLOUR.sub("", text)) is not None


def read_console(path: Path, text: str) -> Evidence:
    """Loss and grad norm of each logged step, with the rounding of what is printed.

    Raises EvidenceError for a line that is cut or garbled, or when several ranks' lines are mixed.
    """
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
            fail(path, line, f"a step without its loss and grad norm: {content.strip()[-80:]!r}")
        steps.append(int(step["step"]))
        for signal, column in columns.items():
            printed = values[signal].replace(",", "")
            column.append(number(path, line, signal, printed))
            decimals = len(printed.partition(".")[2])
            rounding[signal] = max(rounding[signal], 0.5 * 10.0**-decimals if decimals else 0.0)
        rank = _RANK.match(content)
        ranks.add(rank[1] if rank else "")
    if len(ranks) > 1:
        raise EvidenceError(
            f"{path}: steps of several ranks ({', '.join(sorted(filter(None, ranks)))}) are mixed; "
            "give the log of one rank"
        )
    return Evidence(
        name=path.stem,
        source=f"{path} (console log: rounded)",
        steps=tuple(steps),
        signals={signal: tuple(column) for signal, column in columns.items()},
        rounding=rounding,
    )
