"""TensorBoard event folders as evidence. TensorBoard stores float32."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import EvidenceError, installing
from harness.model import Column, Evidence
from harness.readers.names import Columns, find_signals
from harness.readers.points import Points, settle

EVENT_FILES = "events.out.tfevents*"
_LENGTH = struct.Struct("<Q")
_CHECKSUM = 4
"""Bytes; a record is its length, that one's checksum, the content, that one's checksum."""


def is_tensorboard(path: Path) -> bool:
    """Whether a folder holds event files somewhere below, or a file is one."""
    return any(path.rglob(EVENT_FILES)) if path.is_dir() else path.match(EVENT_FILES)


@dataclass(slots=True)
class _Scalars:
    """The points of one tag, in the order of the files."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    wall_times: array[float] = field(default_factory=lambda: array("d"))


def read_tensorboard(path: Path, columns: Columns) -> Evidence:
    """The scalars of one run, at the steps of its loss; incomplete when the last file was cut.

    Raises EvidenceError when tensorboard is not installed, when several runs are below the
    folder, when a file is damaged, or when no tag is a known name of the loss.
    """
    source = _one_run(path)
    files = [source] if source.is_file() else sorted(source.glob(EVENT_FILES))
    tags: dict[str, _Scalars] = {}
    whole = True
    for file in files:
        written, whole = _records(file)
        read = 0
        for event in _events(path, file):
            read += 1
            for value in event.summary.value:
                scalar = _scalar(value)
                if scalar is not None:
                    scalars = tags.setdefault(value.tag, _Scalars())
                    scalars.steps.append(event.step)
                    scalars.values.append(scalar)
                    scalars.wall_times.append(event.wall_time)
        if read < written:
            # TensorBoard's loader takes a damaged record for the end of the file.
            raise EvidenceError(f"{file}: record {read + 1} of {written} is damaged")
    found = find_signals(str(path), tags, columns)
    points: dict[str, Points] = {}
    for signal, tag in found.items():
        steps = np.asarray(tags[tag].steps)
        points[signal] = Points(steps, Column.of(np.asarray(tags[tag].values)))
        if signal == "loss":
            times = np.asarray(tags[tag].wall_times)
            points["seconds"] = Points(steps, Column.of(times - times[0]))
    return settle(points, grid=("loss",)).evidence(
        path.stem if path.is_file() else path.name, source=str(path), complete=whole
    )


def _one_run(path: Path) -> Path:
    """The folder (or file) of the only run at or below a path."""
    if path.is_file():
        return path
    folders = sorted({file.parent for file in path.rglob(EVENT_FILES)})
    if len(folders) > 1:
        shown = ", ".join(str(folder) for folder in folders[:4])
        raise EvidenceError(f"{path}: {len(folders)} runs are below it; give one: {shown}")
    return folders[0]


def _events(path: Path, file: Path) -> Iterator[Any]:
    """All events of a file, up to its end or the first damaged record.

    The loader, not the accumulator on top of it, which by default keeps a sample of 10,000 points
    and drops those that a restart replayed.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import (  # noqa: PLC0415
            LegacyEventFileLoader,  # imported on use: the light part works without it
        )
    except ImportError as error:
        raise EvidenceError(
            f"{path}: reading TensorBoard files needs tensorboard: {installing('tensorboard')}"
        ) from error
    yield from LegacyEventFileLoader(str(file)).Load()


def _scalar(value: Any) -> float | None:
    """A summary's number, None for what is none: newer writers keep numbers as tensors."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.util.tensor_util import make_ndarray  # noqa: PLC0415 # imported on use

    number = make_ndarray(value.tensor)
    return float(number) if np.issubdtype(number.dtype, np.number) else None


def _records(file: Path) -> tuple[int, bool]:
    """How many whole records a file has, and whether it ends after one: a kill may cut the last."""
    count = at = 0
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
                at += _LENGTH.size + _LENGTH.unpack(head)[0] + 2 * _CHECKSUM
                if at > size:
                    return count, False
                count += 1
                stream.seek(at)
    except OSError as error:
        raise EvidenceError(f"{file}: cannot be read: {error.strerror or error}") from error
    return count, not head
