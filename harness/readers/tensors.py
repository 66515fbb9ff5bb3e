"""Per-tensor evidence of a run folder: ``tensors/step-NNNNNNNN.npz``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.model import BufferRows, PostStepState, TensorSample
from harness.readers.arrays import (
    Arrays,
    array_of,
    head_of,
    load_arrays,
    rows_of,
    states_of,
)
from harness.readers.lines import fail
from harness.run_folder.arrays import GRADIENTS, PARAMETERS, PROJECTIONS
from harness.run_folder.layout import SAMPLE, TENSORS


def read_samples(folder: Path) -> tuple[TensorSample, ...]:
    """The samples of a run folder, in the order of the steps; those that are not there are missing.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    samples = [read_sample(path) for path in sorted((folder / TENSORS).glob(f"{SAMPLE}-*.npz"))]
    return tuple(sorted(samples, key=lambda sample: sample.step))


def read_sample(path: Path) -> TensorSample:
    """One file; raises as ``read_samples``."""
    arrays = load_arrays(path)
    step, names, sizes = head_of(path, arrays, SAMPLE)
    parameters = rows_of(path, arrays, PARAMETERS, sizes)
    gradients = rows_of(path, arrays, GRADIENTS, sizes) if step else None
    return TensorSample(
        step,
        names,
        sizes,
        parameters,
        gradients,
        _post_step(path, arrays, len(names)),
        _buffers(path, arrays),
    )


def _post_step(path: Path, arrays: Arrays, count: int) -> PostStepState | None:
    """What clipping and the optimizer left; None in a file that says nothing of it."""
    if "clipped_norm" not in arrays:
        return None
    clipped = array_of(path, arrays, "clipped_norm", np.float64, 1, rows=count)
    if (clipped < 0).any():
        fail(str(path), "clipped_norm: a number below 0")
    return PostStepState(clipped, *states_of(path, arrays, count))


def _buffers(path: Path, arrays: Arrays) -> BufferRows | None:
    """The buffers; None in a file that says nothing of them."""
    if "buffer_names" not in arrays:
        return None
    names = array_of(path, arrays, "buffer_names", np.str_, 1)
    if not (names[:-1] < names[1:]).all():
        fail(str(path), "buffer_names: not unique and sorted names")
    sizes = array_of(path, arrays, "buffer_sizes", np.int64, 1, rows=len(names))
    norm = array_of(path, arrays, "buffer_norm", np.float64, 1, rows=len(names))
    sketch = array_of(path, arrays, "buffer_sketch", np.float64, 2, rows=len(names))
    if sketch.shape[1] != PROJECTIONS:
        fail(str(path), f"buffer_sketch: has {sketch.shape[1]} projections, must be {PROJECTIONS}")
    return BufferRows(tuple(names.tolist()), sizes, norm, sketch)
