"""What the frozen steps of a run left: ``frozen.npz`` (docs/architecture.md)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.model import FrozenSamples
from harness.readers.arrays import array_of, load_arrays, parameters_of
from harness.readers.lines import fail
from harness.run_folder.arrays import PROJECTIONS
from harness.run_folder.layout import FROZEN


def read_frozen(folder: Path) -> FrozenSamples | None:
    """The file of a run folder; None where there is none.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    path = folder / FROZEN
    if not path.is_file():
        return None
    arrays = load_arrays(path)
    names, sizes = parameters_of(path, arrays)
    loss = array_of(path, arrays, "loss", np.float64, 1)
    count = len(loss)
    sketch = array_of(path, arrays, "gradients_sketch", np.float64, 3, rows=count)
    norm = array_of(path, arrays, "gradients_norm", np.float64, 2, rows=count)
    digests = array_of(path, arrays, "batch_digests", np.str_, 1, rows=count)
    problems = array_of(path, arrays, "problems", np.str_, 1)
    again = None  # files of older runs do not have it
    if "again_sketch" in arrays:
        again = array_of(path, arrays, "again_sketch", np.float64, 2, rows=len(names))
        if again.shape[1] != PROJECTIONS:
            fail(str(path), f"again_sketch: has shape {again.shape}")
    if sketch.shape[1:] != (len(names), PROJECTIONS):
        fail(str(path), f"gradients_sketch: has shape {sketch.shape}")
    if norm.shape[1] != len(names):
        fail(str(path), f"gradients_norm: has shape {norm.shape}")
    return FrozenSamples(
        names=names,
        sizes=sizes,
        sketch=sketch,
        norm=norm,
        loss=loss,
        batch_digests=tuple(digests.tolist()),
        problems=tuple(problems.tolist()),
        again=again,
    )
