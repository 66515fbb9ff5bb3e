"""Logs of MLPerf Training: the evaluations of one run as a curve over samples, and when it ended.

A line has the word ``:::MLLOG`` and a JSON object with ``key``, ``value`` and ``metadata``; other
output of the program may come in between (github.com/mlcommons/logging). Evaluations are
``eval_accuracy``, ``eval_error`` or ``eval_loss`` with the samples seen so far (``samples_count``,
else ``epoch_num``, in which several benchmarks count samples). The "accuracy" of some benchmarks is
a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from converge_harness.errors import EvidenceError
from converge_harness.model import Convergence, Evidence
from converge_harness.readers.foreign.format import Format
from converge_harness.readers.foreign.names import STEP, Columns
from converge_harness.readers.foreign.rows import RowCollector
from converge_harness.readers.lines import decode_json, fail, line_of, number_at, read_text

TOKEN = ":::MLLOG"
LOSSES = frozenset({"gpt3", "llama2_70b_lora", "llama31_405b", "llama31_8b"})
"""Benchmarks of language models, whose ``eval_accuracy`` is a cross entropy: lower is better."""
EVALUATIONS = ("eval_loss", "eval_error", "eval_accuracy")
OF_LENGTHS = ("eval_error", "eval_accuracy")
"""Evaluations from which MLPerf takes how long a run trained (mlperf_logging rcp_checker)."""
STABLE_DIFFUSION = "stable_diffusion"
IN_SAMPLES = frozenset(
    {
        "deepseekv3_671b",
        "flux1",
        "gpt_oss_20b",
        "llama2_70b_lora",
        "llama31_405b",
        "llama31_8b",
        "qwen35_397b_grpo",
        STABLE_DIFFUSION,
    }
)
"""Benchmarks whose length is ``samples_count``; for any other it is ``epoch_num``, whatever its
tables count (mlperf_logging rcp_checker)."""
_PLACES = ("samples_count", "epoch_num")
_MOST_FID, _LEAST_CLIP = 90.0, 0.15
"""The target of ``stable_diffusion`` (mlperf_logging rcp_checker)."""


FORMAT = Format(
    f"logs of MLPerf Training ({TOKEN})",
    read=lambda source: read_mllog(source.path, source.text, source.columns),
    has_content=lambda source: is_mllog(source.text),
)


class _Event(NamedTuple):
    """One line of the log."""

    line: int
    key: str
    value: Any
    metadata: dict[str, Any]


def is_mllog(text: str) -> bool:
    """Whether a text has lines of MLPerf's logger."""
    return TOKEN in text


def read_mllog(path: Path, text: str, columns: Columns) -> Evidence:
    """One point for every evaluation; steps are samples.

    The loss's key is known for benchmarks of language models; for any other, ``columns`` must name
    it (``loss=eval_error``). A run that did not end in success is not complete. Raises
    EvidenceError naming file and line.
    """
    place = line_of(path)
    events = list(_events(path, text))
    benchmark = _last(events, "submission_benchmark")
    named = {**columns, STEP: columns.get(STEP, STEP)}
    if "loss" not in columns:
        named["loss"] = _loss_key(path, events, benchmark)
    rows = RowCollector(str(path), place, named)
    for event in events:
        if event.key != named["loss"]:
            continue
        counted = [event.metadata[name] for name in _PLACES if name in event.metadata]
        if not counted:
            fail(place(event.line), f"{event.key} without samples_count or epoch_num")
        if isinstance(counted[0], float) and not counted[0].is_integer():
            fail(
                place(event.line),
                f"{event.key} after {counted[0]} epochs: a curve needs whole numbers; log "
                "samples_count",
            )
        rows.add(event.line, {named[STEP]: counted[0], event.key: event.value})
    stops = [event.metadata.get("status") for event in events if event.key == "run_stop"]
    ended = bool(stops) and stops[-1] == "success"
    problems = () if ended else (f"ended with {stops[-1] if stops else 'no run_stop'}",)
    return rows.evidence(path.stem, complete=ended, problems=problems)


def read_convergence(path: Path) -> Convergence:
    """When a successful run reached its target: at the last evaluation before its end.

    For ``stable_diffusion``, which logs two metrics separately, at the first evaluation at which
    both have reached their targets. In samples or epochs, as the benchmark counts. Raises
    EvidenceError for a file that is not a log, or has no benchmark or global batch size.
    """
    place = line_of(path)
    events = list(_events(path, read_text(path)))
    if not events:
        raise EvidenceError(f"{path}: has no line of MLPerf's logger ({TOKEN})")
    benchmark, size = (_last(events, key) for key in ("submission_benchmark", "global_batch_size"))
    if not isinstance(benchmark, str):
        raise EvidenceError(f"{path}: has no submission_benchmark")
    size = int(size) if isinstance(size, float) and size.is_integer() else size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise EvidenceError(f"{path}: global_batch_size is {size!r}")
    stops = [event for event in events if event.key == "run_stop"]
    ended = bool(stops) and stops[-1].metadata.get("status") == "success"
    length = math.inf
    if ended:
        before = events[: events.index(stops[-1])]
        evaluations = [each for each in before if each.key in OF_LENGTHS]
        if not evaluations:
            fail(place(stops[-1].line), "success without an evaluation before it")
        if benchmark == STABLE_DIFFUSION:
            length = _first_at_target(path, evaluations)
        else:
            length = _length(path, evaluations[-1], benchmark)
    return Convergence(path.stem, str(path), benchmark, size, length)


def _length(path: Path, evaluation: _Event, benchmark: str) -> float:
    """How long a run had trained when it was evaluated, in samples or epochs."""
    name = "samples_count" if benchmark in IN_SAMPLES else "epoch_num"
    at = evaluation.metadata.get(name)
    if not isinstance(at, (int, float)) or isinstance(at, bool) or not 0 < at < math.inf:
        fail(
            line_of(path)(evaluation.line),
            f"{evaluation.key} without {name}, in which MLPerf counts {benchmark}",
        )
    return float(at) if benchmark in IN_SAMPLES else round(float(at), 3)  # as rcp_checker does


def _first_at_target(path: Path, evaluations: list[_Event]) -> float:
    """Samples after which ``stable_diffusion`` first has both metrics at their targets."""
    place = line_of(path)
    scores: dict[float, dict[str, float | None]] = {}
    for each in evaluations:
        if each.metadata.get("samples_count") == 0:
            continue  # before training
        at = _length(path, each, STABLE_DIFFUSION)
        value = number_at(place, each.line, each.key, each.value)
        scores.setdefault(at, {})[str(each.metadata.get("metric"))] = value
    there = []
    for at, score in scores.items():
        fid, clip = score.get("FID"), score.get("CLIP")
        if fid is not None and clip is not None and fid <= _MOST_FID and clip >= _LEAST_CLIP:
            there.append(at)
    if not there:
        fail(
            place(evaluations[-1].line),
            f"success, but no evaluation has both a FID of at most {_MOST_FID:g} and a CLIP of at "
            f"least {_LEAST_CLIP}",
        )
    return min(there)


def _events(path: Path, text: str) -> Iterator[_Event]:
    place = line_of(path)
    for line, content in enumerate(text.split("\n"), start=1):
        _, token, written = content.rpartition(TOKEN)
        if not token:
            continue
        try:
            event = decode_json(written.strip())
        except ValueError as error:
            fail(place(line), f"not JSON after {TOKEN}: {error}")
        if not isinstance(event, dict) or not isinstance(event.get("key"), str):
            fail(place(line), f"no object with a key after {TOKEN}")
        metadata = event.get("metadata")
        yield _Event(
            line, event["key"], event.get("value"), metadata if isinstance(metadata, dict) else {}
        )


def _last(events: list[_Event], key: str) -> Any:
    return next((event.value for event in reversed(events) if event.key == key), None)


def _loss_key(path: Path, events: list[_Event], benchmark: object) -> str:
    """The evaluations' key, if it is certainly a loss; else raises EvidenceError."""
    there = [key for key in EVALUATIONS if any(event.key == key for event in events)]
    if not there:
        raise EvidenceError(f"{path}: has no evaluation ({', '.join(EVALUATIONS)})")
    if there[0] != "eval_accuracy" or benchmark in LOSSES:
        return there[0]
    raise EvidenceError(
        f"{path}: {there[0]} of {benchmark or 'an unnamed benchmark'} may be a score, for "
        f"which higher is better; if it is a loss, add --columns loss={there[0]}"
    )
