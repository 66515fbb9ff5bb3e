"""What checkpoints hold, as saved and as loaded: ``state/*.npz`` of a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.model import Floats, StateSample
from harness.readers.arrays import (
    Arrays,
    array_of,
    count_of,
    head_of,
    load_arrays,
    rows_of,
    states_of,
)
from harness.readers.lines import fail
from harness.run_folder.arrays import PARAMETERS, PROJECTIONS, UNKNOWN
from harness.run_folder.layout import LOADED, SAVED, STATE
from harness.store import read_json


def read_saved(folder: Path) -> tuple[StateSample, ...]:
    """State at every checkpoint that a pass wrote, in order; raises as ``read_state``."""
    samples = [read_state(path, SAVED) for path in (folder / STATE).glob(f"{SAVED}-*.npz")]
    return tuple(sorted(samples, key=lambda sample: sample.step))


def read_whole(folder: Path) -> tuple[int, ...]:
    """Steps of the checkpoints whose save had returned in a pass, in order: a manifest names each.

    Raises StoreError for a damaged or newer manifest.
    """
    paths = sorted((folder / STATE).glob(f"{SAVED}-*.json"))
    for path in paths:
        read_json(path)
    steps = (path.stem.removeprefix(f"{SAVED}-") for path in paths)
    return tuple(sorted(int(step) for step in steps if step.isdecimal()))


def read_loaded(folder: Path) -> StateSample | None:
    """State right after the load of a pass; None when it loaded nothing, or died before.

    Raises as ``read_state``, and EvidenceError for more than one: a pass loads once.
    """
    paths = sorted((folder / STATE).glob(f"{LOADED}-*.npz"))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        fail(str(folder), f"holds {names}, but a pass loads once; run the job again")
    return read_state(paths[0], LOADED) if paths else None


def read_state(path: Path, prefix: str) -> StateSample:
    """One file, named after its prefix and step.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    arrays = load_arrays(path)
    step, names, sizes = head_of(path, arrays, prefix)
    count = len(names)
    states, state_norm, state_steps = states_of(path, arrays, count)
    return StateSample(
        step=step,
        names=names,
        sizes=sizes,
        parameters=rows_of(path, arrays, PARAMETERS, sizes),
        states=states,
        state_norm=state_norm,
        state_sketch=_sketches(path, arrays, state_norm),
        state_steps=state_steps,
        lr=float(array_of(path, arrays, "lr", np.float64, 0)),
        trainer_step=_counter(path, arrays, "trainer_step"),
        tokens_seen=_known(path, arrays, "tokens_seen"),
        samples_consumed=_known(path, arrays, "samples_consumed"),
    )


def _sketches(path: Path, arrays: Arrays, norm: Floats) -> Floats:
    """Sketches of the optimizer's states: parameters x states x 64."""
    sketch: Floats = array_of(path, arrays, "state_sketch", np.float64, 3, rows=norm.shape[0])
    if sketch.shape[1:] != (norm.shape[1], PROJECTIONS):
        fail(
            str(path),
            f"state_sketch: has shape {sketch.shape}, must be {(*norm.shape, PROJECTIONS)}",
        )
    if ((norm > 0) & ~sketch.any(axis=2)).any():
        fail(str(path), "state_sketch: is empty for a state whose norm is not 0")
    return sketch


def _known(path: Path, arrays: Arrays, key: str) -> int | None:
    """A counter that may be unknown, which is written as -1."""
    value = count_of(path, arrays, key)
    return None if value == UNKNOWN else _counter(path, arrays, key)


def _counter(path: Path, arrays: Arrays, key: str) -> int:
    value = count_of(path, arrays, key)
    if value < 0:
        fail(str(path), f"{key}: is {value}, a count below 0")
    return value
