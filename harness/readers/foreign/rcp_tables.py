"""MLPerf's tables of reference convergence points: ``rcps_llama31_8b.json``.

A table is a JSON object with points by name, each with ``Benchmark``, ``BS`` (the global batch
size) and one length per run under ``Epochs to converge`` or ``samples to converge``
(github.com/mlcommons/logging, ``mlperf_logging/rcp_checker``).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from converge_harness.errors import EvidenceError
from converge_harness.model import Rcp
from converge_harness.readers.lines import decode_json, fail, read_text

LENGTHS = ("Epochs to converge", "samples to converge")
"""For language models both count samples; the unit depends on the benchmark only."""

_LIKE = "a table looks like mlperf_logging/rcp_checker/training_6.0.0/rcps_llama31_8b.json"


def read_rcps(path: Path) -> tuple[Rcp, ...]:
    """The points of a table, by global batch size; raises EvidenceError naming file and point."""
    text = read_text(path)
    try:
        table = decode_json(text)
    except ValueError as error:
        raise EvidenceError(f"{path}: not JSON: {error}; {_LIKE}") from error
    if not isinstance(table, dict) or not table:
        raise EvidenceError(f"{path}: not an object of reference convergence points; {_LIKE}")
    points = tuple(
        sorted(
            (_point(f"{path}: {name}", name, value) for name, value in table.items()),
            key=lambda point: point.batch_size,
        )
    )
    benchmarks = dict.fromkeys(point.benchmark for point in points)
    if len(benchmarks) > 1:
        raise EvidenceError(f"{path}: points of several benchmarks ({', '.join(benchmarks)})")
    sizes = [point.batch_size for point in points]
    if again := next((size for size in sizes if sizes.count(size) > 1), None):
        raise EvidenceError(f"{path}: several points of global batch size {again}")
    return points


def _point(place: str, name: str, value: Any) -> Rcp:
    if not isinstance(value, dict):
        fail(place, f"a {type(value).__name__}, not a point; {_LIKE}")
    benchmark, size = value.get("Benchmark"), value.get("BS")
    if not isinstance(benchmark, str):
        fail(place, f"Benchmark is {benchmark!r}, not a name; {_LIKE}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        fail(place, f"BS is {size!r}, not a global batch size; {_LIKE}")
    lengths = next((value[key] for key in LENGTHS if key in value), None)
    if not isinstance(lengths, list) or not all(map(_is_length, lengths)):
        fail(place, f"not a list of positive numbers under {' or '.join(map(repr, LENGTHS))}")
    return Rcp(name, benchmark, size, tuple(map(float, lengths)))


def _is_length(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0
