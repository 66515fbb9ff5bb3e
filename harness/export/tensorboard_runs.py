"""A folder for ``tensorboard --logdir``: one run per control, repeat and test set.

Written by TensorBoard's own record writer, which needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.errors import StoreError, installing
from harness.export.curves import ExportedRun
from harness.store import atomic_write, slug

EVENT_FILE = "events.out.tfevents.converge"
"""One name for all exports: writing again replaces what an earlier export wrote."""
_FORMAT = "brain.Event:2"
"""What every event file begins with."""


def write_tensorboard(runs: Sequence[ExportedRun], folder: Path) -> list[Path]:
    """Write one folder per run, each file at once; return the files in the order of the runs.

    Values are float32, as TensorBoard's scalars are. A point's wall time is the seconds since the
    run's training began, so that TensorBoard's relative time is the training's.

    Raises StoreError when tensorboard is not installed or the folder cannot be written.
    """
    paths = []
    for run, name in zip(runs, _folders(runs), strict=True):
        path = folder / name / EVENT_FILE
        atomic_write(path, _event_file(run, folder))
        paths.append(path)
    return paths


def _folders(runs: Iterable[ExportedRun]) -> Iterator[str]:
    """A folder name for each run; names that become the same one are told apart by a number."""
    taken: set[str] = set()
    for run in runs:
        plain = slug(run.name)
        tries = (plain, *(f"{plain}-{count}" for count in range(2, len(taken) + 2)))
        name = next(each for each in tries if each.casefold() not in taken)
        taken.add(name.casefold())
        yield name


def _event_file(run: ExportedRun, folder: Path) -> bytes:
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 # imported on use:
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 # the light part
        from tensorboard.summary.writer.record_writer import (  # noqa: PLC0415 # works without it
            RecordWriter,
        )
    except ImportError as error:
        raise StoreError(
            f"{folder}: writing for TensorBoard needs tensorboard: {installing('tensorboard')}"
        ) from error
    stream = io.BytesIO()
    writer: Any = RecordWriter(stream)
    writer.write(Event(file_version=_FORMAT).SerializeToString())
    for tag, points in run.curves.items():
        for step, value in zip(points.steps.tolist(), points.values.tolist(), strict=True):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            when = run.seconds.get(step, 0.0)
            writer.write(Event(wall_time=when, step=step, summary=summary).SerializeToString())
    return stream.getvalue()
