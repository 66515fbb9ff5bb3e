"""Megatron-LM's console log: one line per logging interval, as ``training_log`` prints it.

::

     [2026-03-04 09:00:07.25] iteration       10/     200 | consumed samples:          320 | …
     | learning rate: 1.500000E-05 | global batch size:    32 | lm loss: 1.067915E+01 |
     loss scale: 1.0 | grad norm: 4.112 | number of skipped iterations:   0 |
     number of nan iterations:   0 |

(one line in the log). Source of the layout: ``training_log`` in ``megatron/training/training.py``.
Losses are means over the interval's iterations that were not skipped. Grad norm and learning rate
are those of its last iteration.

Three numbers are not what they look like. A loss that is NaN is left out of its line. An interval
whose iterations were all skipped has the loss 0. And a skipped iteration whose loss was NaN is
counted, but not in the mean: such an interval's loss is read as NaN, since it happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from converge_harness.model import Evidence, Integers
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import Columns, candidates
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.lines import fail, line_of, number_at

_ITERATION = re.compile(r"\biteration +(?P<step>\d+)/ *\d+ *\|")
_STEP = "iteration"
_LOSS = "lm loss"
_SKIPPED = "number of skipped iterations"
_NAN = "number of nan iterations"
"""The last value of a line: without it, the line is cut."""

FORMAT = Format(
    "Megatron-LM's console logs",
    read=lambda source: read_megatron_console(source.path, source.text, source.columns),
    has_content=lambda source: is_megatron_console(source.text),
)


def is_megatron_console(text: str) -> bool:
    """Whether a text has a line of Megatron-LM's training log."""
    return _ITERATION.search(text) is not None


def read_megatron_console(path: Path, text: str, columns: Columns) -> Evidence:
    """Loss, grad norm and learning rate of each logged interval, at its last iteration.

    Raises EvidenceError, naming file and line, for a line that is cut or garbled.
    """
    place = line_of(path)
    loss = columns.get("loss", _LOSS)
    found = list(_lines(path, text, columns))
    logs_it = any(loss in values for _, values in found)
    rows = RowCollector(str(path), place, columns)
    for line, values in found:
        skipped, nans = (
            number_at(place, line, name, values[name]) or 0 for name in (_SKIPPED, _NAN)
        )
        if nans or (logs_it and loss not in values):
            values[loss] = "nan"
        elif skipped and number_at(place, line, loss, values.get(loss)) == 0:
            del values[loss]
        rows.add(line, values)
    evidence = rows.evidence(path.stem)
    return replace(evidence, mean_over=_interval(evidence.steps))


def _interval(steps: Integers) -> int:
    """The logging interval; 0 if it changes. Iteration 1 may have a line of its own."""
    distances = np.unique(np.diff(steps[steps > 1]))
    return int(distances[0]) if distances.size == 1 else 0


def _lines(path: Path, text: str, columns: Columns) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and values of each line of training; ``iteration`` is one of them."""
    place = line_of(path)
    wanted = candidates(columns) | {_SKIPPED, _NAN}
    for line, content in enumerate(text.split("\n"), start=1):
        begin = _ITERATION.search(content)
        if begin is None:
            continue
        values = {_STEP: begin["step"]}
        *whole, rest = content[begin.end() :].split("|")
        for cell in whole:
            name, colon, value = (part.strip() for part in cell.partition(":"))
            if name in values or (name in wanted and not value):
                what = "twice" if value else "without a value"
                fail(place(line), f"{name!r} {what}: the line is cut, or two lines are mixed")
            if colon:
                values[name] = value
        if _ITERATION.search(content, begin.end()) or not {_SKIPPED, _NAN} <= values.keys():
            end = (rest or content).strip()[-60:]
            fail(place(line), f"a line that is cut, or mixed with another one: it ends in {end!r}")
        yield line, values
