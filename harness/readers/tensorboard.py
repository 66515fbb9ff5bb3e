"""TensorBoard event folders as evidence. TensorBoard stores float32."""

from __future__ import annotations

from pathlib import Path

from harness.errors import EvidenceError
from harness.model import Evidence
from harness.readers.names import find_signals

EVENT_FILES = "events.out.tfevents*"


def is_tensorboard(path: Path) -> bool:
    """Whether a folder holds event files somewhere below, or a file is one."""
    return any(path.rglob(EVENT_FILES)) if path.is_dir() else path.match(EVENT_FILES)


def read_tensorboard(path: Path) -> Evidence:
    """The scalars of one run.

    Raises EvidenceError when tensorboard is not installed, when several runs are below the
    folder, or when no tag is a known name of the loss.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415
            EventAccumulator,  # imported on use: the light part works without it
        )
    except ImportError as error:
        raise EvidenceError(
            f"{path}: reading TensorBoard files needs tensorboard: "
            "pip install 'converge[tensorboard]'"
        ) from error
    source = _one_run(path)
    # By default the accumulator keeps a sample of 10,000 points, and drops points that a restart
    # replayed; judging wants all that was written.
    events = EventAccumulator(str(source), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    found = find_signals(str(path), events.Tags()["scalars"])
    loss = events.Scalars(found["loss"])
    steps = tuple(event.step for event in loss)
    signals: dict[str, tuple[float | None, ...]] = {}
    for signal, tag in found.items():
        scalars = events.Scalars(tag)
        if tuple(event.step for event in scalars) == steps:
            signals[signal] = tuple(event.value for event in scalars)
        else:
            by_step = {event.step: event.value for event in scalars}
            signals[signal] = tuple(by_step.get(step) for step in steps)
    began = loss[0].wall_time if loss else 0.0
    signals["seconds"] = tuple(event.wall_time - began for event in loss)
    return Evidence(
        name=path.stem if path.is_file() else path.name,
        source=f"{path}",
        steps=steps,
        signals=signals,
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
