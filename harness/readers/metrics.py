"""``metrics.jsonl`` of a run folder: what the run said step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.model import Column, ReplicaSample
from harness.readers.documents import METRICS, is_texts
from harness.readers.lines import (
    Place,
    fail,
    json_objects,
    line_of,
    numbers,
    read_text,
    step_number,
    step_numbers,
)
from harness.readers.points import Points, Settled, settle
from harness.readers.replicas import read_replicas
from harness.store import check_schema

SIGNALS = (
    "loss",
    "grad_norm",
    "loss_recomputed",
    "grad_norm_recomputed",
    "lr",
    "tokens",
    "seconds",
    "memory_bytes",
    "grads_missing",
)
"""Numbers of a step line."""
DIGEST = "batch_digest"
AGREES = "batch_agrees"

_Lines = Sequence[tuple[int, Mapping[str, Any]]]
"""Line numbers and the objects that stand there."""


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """The content of a metrics file, every step once."""

    identity: str | None
    settled: Settled
    batch_digests: tuple[str | None, ...]
    batch_agrees: tuple[bool | None, ...]
    grads_missing: tuple[str, ...]
    replicas: tuple[ReplicaSample, ...]
    problems: tuple[str, ...]
    """What the probe could not measure, the step in each sentence."""
    ended: bool
    """Whether the run wrote its end line."""
    expected_steps: int | None


def read_metrics(folder: Path) -> Metrics:
    """The metrics file of a folder; the finished one if both are there, nothing if none is.

    Raises EvidenceError naming file and line, StoreError for a newer file.
    """
    path = next((folder / name for name in METRICS if (folder / name).is_file()), None)
    if path is None:
        return Metrics(None, settle({}), (), (), (), (), (), ended=False, expected_steps=None)
    text = read_text(path)
    if path.suffix == ".part":
        # A killed writer leaves half a line, which says nothing.
        text = text[: text.rfind("\n") + 1]
    place = line_of(path)
    header: dict[str, Any] = {}
    end: dict[str, Any] | None = None
    steps: list[tuple[int, dict[str, Any]]] = []
    replicas: list[tuple[int, dict[str, Any]]] = []
    for line, value in json_objects(path, text):
        kind = value.get("kind")
        if not header:
            if kind != "header":
                fail(place(line), f"kind is {kind!r}, but the first line must be the header")
            check_schema(path, value.get("schema"))
            header = value
        elif end is not None:
            fail(place(line), "a line after the end line")
        elif kind == "step":
            steps.append((line, value))
        elif kind == "replicas":
            replicas.append((line, value))
        elif kind == "end":
            end = value
        else:
            fail(place(line), f"kind is {kind!r}, must be 'step', 'replicas' or 'end'")
    settled, digests, agrees = _settled(place, steps)
    samples, differences = read_replicas(place, replicas)
    missing = _texts(place, steps, "grads_missing_names")
    problems = _texts(place, steps, "problems")
    expected = header.get("steps")
    return Metrics(
        identity=header.get("identity"),
        settled=replace(settled, differences=_both(settled.differences, differences)),
        batch_digests=digests,
        batch_agrees=agrees,
        grads_missing=tuple(dict.fromkeys(name for _, name in missing)),
        replicas=samples,
        problems=tuple(dict.fromkeys(f"step {step}: {sentence}" for step, sentence in problems)),
        ended=end is not None,
        expected_steps=None if expected is None else step_number(place, 1, expected),
    )


def _settled(
    place: Place, lines: _Lines
) -> tuple[Settled, tuple[str | None, ...], tuple[bool | None, ...]]:
    """Signals, batch digests and their agreement, every step once."""
    rows = [line for line, _ in lines]
    steps = step_numbers(place, rows, [value.get("step") for _, value in lines])
    columns = {
        name: numbers(place, rows, name, [value.get(name) for _, value in lines])
        for name in SIGNALS
    }
    columns = {name: column for name, column in columns.items() if column.present.any()}
    digests, words = _digest_codes(place, lines)
    columns |= {DIGEST: digests, AGREES: _flags(place, lines)}
    settled = settle(
        {name: Points(steps, column) for name, column in columns.items()},
        spell={DIGEST: lambda code: words[int(code)], AGREES: lambda flag: str(bool(flag))},
    )
    signals = dict(settled.signals)
    codes, flags = signals.pop(DIGEST), signals.pop(AGREES)
    return (
        replace(settled, signals=signals),
        tuple(None if code is None else words[int(code)] for code in codes),
        tuple(None if flag is None else bool(flag) for flag in flags),
    )


def _digest_codes(place: Place, lines: _Lines) -> tuple[Column, list[str]]:
    """Digests as numbers, which settle as signals do, and the digest of each number."""
    codes: dict[str, int] = {}
    column: list[float | None] = []
    for line, values in lines:
        value = values.get(DIGEST)
        if not (value is None or isinstance(value, str)):
            fail(place(line), f"{DIGEST} is {value!r}, which is no text")
        column.append(None if value is None else codes.setdefault(value, len(codes)))
    return Column.of(column), list(codes)


def _flags(place: Place, lines: _Lines) -> Column:
    column: list[float | None] = []
    for line, values in lines:
        value = values.get(AGREES)
        if not (value is None or isinstance(value, bool)):
            fail(place(line), f"{AGREES} is {value!r}, must be true, false or null")
        column.append(value)
    return Column.of(column)


def _texts(place: Place, lines: _Lines, name: str) -> list[tuple[Any, str]]:
    """The texts that step lines list under a name, each with its step."""
    found: list[tuple[Any, str]] = []
    for line, values in lines:
        listed = values.get(name)
        if listed is None:
            continue
        if not is_texts(listed):
            fail(place(line), f"{name} is {listed!r}, which is no list of texts")
        found += [(values.get("step"), text) for text in listed]
    return found


def _both(
    some: Mapping[int, tuple[str, ...]], others: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    return {
        step: (*some.get(step, ()), *others.get(step, ())) for step in some.keys() | others.keys()
    }
