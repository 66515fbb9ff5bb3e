"""Golden values of Megatron-LM's functional tests (``golden_values*.json``) as evidence.

Two layouts, both rounded to five decimals::

    {"lm loss": {"start_step": 1, "end_step": 100, "step_interval": 5, "values": {"1": 10.8, …}}}
    {"lm loss": {"start_step": 0, "end_step": 100, "step_interval": 5, "values": [10.8, …]}}

In the mapping a key is an iteration. The list is a slice of all logged values, the first of which
is iteration 1: with ``start_step`` 0, value i is that of iteration ``1 + i * step_interval``
(Megatron-LM, ``tests/functional_tests/python_test_utils``, 2024). With another start, value i is
that of iteration ``start_step + i * step_interval``.

If ``start_step``, ``end_step`` and ``step_interval`` contradict the values, some were removed or
added by hand.

Megatron-LM writes the string ``"nan"`` where its reader found no value, and its comparison treats
all of them as equal. Here it is NaN, so that a curve with one never passes; except before the first
finite loss, because a second pass (``*_2nd.json``), resumed from a checkpoint, ran no earlier
iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from converge_harness.model import Column, Evidence, Integers
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import Columns, find_signals
from converge_harness.readers.foreign.printed_digits import digits_of, printed_with
from converge_harness.readers.lines import fail, numbers, step_number
from converge_harness.readers.points import Points, last_values

VALUES = "values"
FIRST_ITERATION = 1
_OF_STEPS = ("start_step", "end_step", "step_interval")


FORMAT = Format(
    "golden values of Megatron-LM",
    read=lambda source: read_golden_values(source.path, source.document, source.columns),
    has_content=lambda source: is_golden_values(source.document),
)


def is_golden_values(document: object) -> bool:
    """Whether some entry of a JSON object has values."""
    return isinstance(document, dict) and any(
        isinstance(entry, dict) and VALUES in entry for entry in document.values()
    )


def read_golden_values(path: Path, document: Mapping[str, Any], columns: Columns) -> Evidence:
    """The curves of a file, without times, memory and counts of zeros.

    Raises EvidenceError naming file, metric and step.
    """
    metrics = [
        name for name, entry in document.items() if isinstance(entry, dict) and VALUES in entry
    ]
    found = find_signals(str(path), metrics, columns)
    points = {signal: _points(f"{path}: {name}", document[name]) for signal, name in found.items()}
    began = _first_run(points["loss"])
    ran = {signal: _since(each, began) for signal, each in points.items()}
    evidence = last_values(ran, grid=("loss",)).evidence(path.stem, source=str(path))
    contradictions = [
        clause
        for signal, name in found.items()
        for clause in _contradictions(name, document[name], points[signal].steps)
    ]
    digits = {signal: digits_of(_listed(document[name])) for signal, name in found.items()}
    return replace(printed_with(evidence, digits), contradictions=tuple(contradictions))


def _points(where: str, entry: Mapping[str, Any]) -> Points:
    """One metric's values, in either layout."""
    values = entry[VALUES]
    if isinstance(values, dict):
        steps = [step_number(lambda _: where, 0, key) for key in values]
    elif isinstance(values, list):
        start, interval = _count(where, entry, "start_step"), _count(where, entry, "step_interval")
        if interval < 1:
            fail(where, "step_interval is 0, which is impossible for a list of steps")
        steps = [(start or FIRST_ITERATION) + at * interval for at in range(len(values))]
    else:
        fail(where, f"{VALUES} is a {type(values).__name__}, must be a JSON object or a list")
    column = numbers(lambda step: f"{where}, step {step}", steps, "the value", _listed(entry))
    return Points(np.array(steps, dtype=np.int64), column)


def _first_run(loss: Points) -> int:
    """The first iteration that the pass ran, that of its first finite loss; 0 if there is none."""
    finite = loss.steps[np.isfinite(loss.column.values)]
    return int(finite.min(initial=2**62)) if finite.size else 0


def _since(points: Points, step: int) -> Points:
    ran = points.steps >= step
    return Points(points.steps[ran], Column(points.column.values[ran], points.column.present[ran]))


def _listed(entry: Mapping[str, Any]) -> list[Any]:
    """The values of an entry, in the order of the file."""
    values = entry[VALUES]
    return list(values.values()) if isinstance(values, dict) else list(values)


def _contradictions(name: str, entry: Mapping[str, Any], steps: Integers) -> Iterator[str]:
    """Sentences on how the entry's statements contradict ``steps``, those of its values."""
    if not steps.size:
        return
    said = {key: entry[key] for key in _OF_STEPS if entry.get(key) is not None}
    for key, value in said.items():
        if type(value) is not int or value < (key == "step_interval"):
            yield f"{key} of {name!r} is {value!r}, which is not a number of steps"
            return
    start, end, interval = (said.get(key) for key in _OF_STEPS)
    ordered = np.unique(steps)
    first, last = int(ordered[0]), int(ordered[-1])
    gaps = np.diff(ordered)
    # The first interval is shorter: 1, 5, 10.
    spacing = int(np.median(gaps[1:])) if gaps.size > 1 else interval or 1
    if start is not None and not first - spacing < max(start, FIRST_ITERATION) <= first:
        yield f"start_step of {name!r} is {start}, but its first value is at step {first}"
    if end is not None and not last <= end < last + spacing:
        yield f"end_step of {name!r} is {end}, but its last value is at step {last}"
    if interval is not None and spacing != interval:
        yield f"step_interval of {name!r} is {interval}, but its values are {spacing} steps apart"


def _count(where: str, entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        fail(where, f"{key} is {value!r}, must be a whole number from 0")
    return value
