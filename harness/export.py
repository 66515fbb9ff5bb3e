"""The curves of a judged matrix, and their differences to the control, as runs in other tools.

``exported`` gathers a run's curves (pure). ``write_tensorboard`` writes a folder for ``tensorboard
--logdir`` with TensorBoard's own record writer, which needs neither torch nor TensorFlow;
``write_wandb`` makes runs of Weights & Biases, online or offline.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from converge_harness.errors import StoreError, installing
from converge_harness.model import Evidence, Floats, Integers, Role
from converge_harness.store import atomic_write, slug

DIFFERENCE = "difference"
LIMIT = "limit"
"""A tag is a signal's name (``loss``, ``grad_norm``, ``lr`` …), or one of these, a slash and the
signal's name.
"""
_TIME = "seconds"


@dataclass(frozen=True, slots=True, eq=False)
class ExportedPoints:
    """Values over steps; steps without a value are left out."""

    steps: Integers
    """Shape (points,)."""
    values: Floats
    """Shape (points,): NaN or infinite where the run's values are."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportedRun:
    """One control, repeat or test set, as another tool shows it."""

    name: str
    role: Role
    curves: Mapping[str, ExportedPoints]
    """By tag."""
    seconds: Mapping[int, float]
    """Since training began, by step."""
    facts: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Degrees, toolchain, verdict …, for tools that list and filter runs."""


def exported(
    evidence: Evidence,
    role: Role,
    *,
    differences: Mapping[str, ExportedPoints],
    limits: Mapping[str, ExportedPoints],
    facts: Mapping[str, str | int | float | None],
) -> ExportedRun:
    """A run's curves, its differences and their limits.

    ``differences`` and ``limits`` are relative to the control's values, by signal.
    """
    curves = {
        signal: ExportedPoints(evidence.steps[column.present], column.values[column.present])
        for signal, column in evidence.signals.items()
        if signal != _TIME
    }
    for tag, found in ((DIFFERENCE, differences), (LIMIT, limits)):
        curves.update({f"{tag}/{signal}": points for signal, points in found.items()})
    return ExportedRun(
        name=evidence.name,
        role=role,
        curves={tag: points for tag, points in curves.items() if points.steps.size},
        seconds=_seconds(evidence),
        facts=facts,
    )


def _seconds(evidence: Evidence) -> dict[int, float]:
    times = evidence.signals.get(_TIME)
    if times is None:
        return {}
    known = times.present & np.isfinite(times.values)
    return dict(zip(evidence.steps[known].tolist(), times.values[known].tolist(), strict=True))


EVENT_FILE = "events.out.tfevents.converge"
"""The same file name for every export, so that a new one replaces the old one."""
_FORMAT = "brain.Event:2"
"""First record of every event file."""


def write_tensorboard(runs: Sequence[ExportedRun], folder: Path) -> list[Path]:
    """Write one folder per run, each file atomically; return the files in the order of the runs.

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
    """A folder name for each run; equal names get a number."""
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
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 # converge
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


def write_wandb(
    runs: Sequence[ExportedRun], folder: Path, *, project: str, group: str, offline: bool
) -> list[Path]:
    """Log every run to a project, grouped; return the runs' own folders below ``folder``/wandb.

    Offline, nothing leaves this machine: ``wandb sync FOLDER`` sends it later. NaN and infinities
    are kept. Every call makes new runs.

    Raises StoreError when wandb is not installed, is not logged in, or cannot be reached.
    """
    try:
        import wandb  # noqa: PLC0415 # imported on use: converge works without it
    except ImportError as error:
        raise StoreError(
            f"{folder}: writing for Weights & Biases needs wandb: {installing('wandb')}"
        ) from error
    # Print errors only, and do not monitor this process: nothing trains in it.
    settings = wandb.Settings(
        console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for run in runs:
        try:
            with wandb.init(
                project=project,
                group=group,
                name=run.name,
                job_type=str(run.role),
                config=dict(run.facts),
                dir=str(folder),
                mode="offline" if offline else None,
                reinit="create_new",
                settings=settings,
            ) as logged:
                for step, values in _by_step(run).items():
                    logged.log(values, step=step)
                made.append(Path(logged.dir).parent)
        except wandb.Error as error:
            raise StoreError(
                f"{run.name} could not be logged to Weights & Biases: {error}; log in with "
                "`wandb login`, or write without a connection with --offline"
            ) from error
    return made


def _by_step(run: ExportedRun) -> dict[int, dict[str, float]]:
    """What is logged together, by step: wandb drops a step that comes after a later one."""
    steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for tag, points in run.curves.items():
        for step, value in zip(points.steps.tolist(), points.values.tolist(), strict=True):
            steps[step][tag] = value
    for step, seconds in run.seconds.items():
        if step in steps and math.isfinite(seconds):
            steps[step]["seconds"] = seconds
    return dict(sorted(steps.items()))
