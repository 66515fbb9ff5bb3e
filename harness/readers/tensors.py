"""Per-tensor evidence of a run folder: ``tensors/step-NNNNNNNN.npz``."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.model import BufferRows, TensorRows, TensorSample, UpdateRows
from harness.readers.lines import fail
from harness.store import check_schema

FOLDER = "tensors"
_NAME = re.compile(r"step-(\d{8,})\.npz")

PROJECTIONS = 64
"""Of every sketch (docs/architecture.md)."""
Arrays = Mapping[str, npt.NDArray[Any]]


def read_samples(folder: Path) -> tuple[TensorSample, ...]:
    """The samples of a run folder, in the order of the steps; those that are not there are missing.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    samples = [read_sample(path) for path in sorted((folder / FOLDER).glob("step-*.npz"))]
    return tuple(sorted(samples, key=lambda sample: sample.step))


def read_sample(path: Path) -> TensorSample:
    """One file; raises as ``read_samples``."""
    arrays = _load(path)
    schema = _scalar(path, arrays, "schema")
    check_schema(path, schema)
    step = _scalar(path, arrays, "step")
    named = _NAME.fullmatch(path.name)
    if named is None or int(named[1]) != step:
        fail(str(path), f"step is {step}, so its name should be step-{step:08}.npz")
    names = _array(path, arrays, "names", np.str_, 1)
    if not len(names) or not (names[:-1] < names[1:]).all():
        fail(str(path), "names: not unique and sorted parameter names")
    sizes = _array(path, arrays, "sizes", np.int64, 1, rows=len(names))
    if (sizes < 0).any():
        fail(str(path), "sizes: a negative number of entries")
    parameters = _rows(path, arrays, "parameters", sizes)
    gradients = _rows(path, arrays, "gradients", sizes) if step else None
    return TensorSample(
        step,
        tuple(names.tolist()),
        sizes,
        parameters,
        gradients,
        _left(path, arrays, len(names)),
        _buffers(path, arrays),
    )


def _left(path: Path, arrays: Arrays, count: int) -> UpdateRows | None:
    """What clipping and the optimizer left; None in a file that says nothing of it."""
    if "clipped_norm" not in arrays:
        return None
    states = _array(path, arrays, "state_names", np.str_, 1)
    state_norm = _array(path, arrays, "state_norm", np.float64, 2, rows=count)
    if state_norm.shape[1] != len(states):
        fail(str(path), f"state_norm: has {state_norm.shape[1]} states, must have {len(states)}")
    left = UpdateRows(
        _array(path, arrays, "clipped_norm", np.float64, 1, rows=count),
        tuple(states.tolist()),
        state_norm,
        _array(path, arrays, "state_steps", np.float64, 1, rows=count),
    )
    for key in ("clipped_norm", "state_norm", "state_steps"):
        if (arrays[key] < 0).any():
            fail(str(path), f"{key}: a number below 0")
    return left


def _buffers(path: Path, arrays: Arrays) -> BufferRows | None:
    """The buffers; None in a file that says nothing of them."""
    if "buffer_names" not in arrays:
        return None
    names = _array(path, arrays, "buffer_names", np.str_, 1)
    if not (names[:-1] < names[1:]).all():
        fail(str(path), "buffer_names: not unique and sorted names")
    sizes = _array(path, arrays, "buffer_sizes", np.int64, 1, rows=len(names))
    norm = _array(path, arrays, "buffer_norm", np.float64, 1, rows=len(names))
    sketch = _array(path, arrays, "buffer_sketch", np.float64, 2, rows=len(names))
    if sketch.shape[1] != PROJECTIONS:
        fail(str(path), f"buffer_sketch: has {sketch.shape[1]} projections, must be {PROJECTIONS}")
    return BufferRows(tuple(names.tolist()), sizes, norm, sketch)


def _load(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a file; objects are refused, for unpickling one runs its code."""
    key = "no npz file"
    try:
        if not zipfile.is_zipfile(path):
            fail(str(path), "is no npz file; delete the run folder and run the job again")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {}
            for key in archive.files:
                arrays[key] = archive[key]
            return arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        fail(str(path), f"{key}: cannot be read: {error}")


def _array(
    path: Path,
    arrays: Arrays,
    key: str,
    dtype: type[np.str_ | np.int64 | np.float64],
    dimensions: int,
    rows: int | None = None,
) -> npt.NDArray[Any]:
    """An array of the right type and shape."""
    array = arrays.get(key)
    if array is None:
        fail(str(path), f"{key}: is missing; there is {', '.join(arrays) or 'nothing'}")
    if not np.issubdtype(array.dtype, dtype):
        fail(str(path), f"{key}: has dtype {array.dtype}, must be {dtype.__name__.rstrip('_')}")
    if array.ndim != dimensions or (rows is not None and array.shape[0] != rows):
        expected = f"{rows} rows" if rows is not None else "any number of rows"
        fail(
            str(path),
            f"{key}: has shape {array.shape}, must have {dimensions} dimensions and {expected}",
        )
    return array


def _scalar(path: Path, arrays: Arrays, key: str) -> int:
    return int(_array(path, arrays, key, np.int64, 0))


def _rows(path: Path, arrays: Arrays, kind: str, sizes: npt.NDArray[Any]) -> TensorRows:
    count = len(sizes)
    sketch = _array(path, arrays, f"{kind}_sketch", np.float64, 2, rows=count)
    if sketch.shape[1] != PROJECTIONS:
        fail(str(path), f"{kind}_sketch: has {sketch.shape[1]} projections, must be {PROJECTIONS}")
    norm = _array(path, arrays, f"{kind}_norm", np.float64, 1, rows=count)
    if (norm < 0).any():
        fail(str(path), f"{kind}_norm: a norm below 0")
    if ((norm > 0) & ~sketch.any(axis=1)).any():
        fail(str(path), f"{kind}_sketch: is empty for a tensor whose norm is not 0")
    counts = {}
    for what in ("zeros", "not_finite"):
        key = f"{kind}_{what}"
        counts[what] = _array(path, arrays, key, np.int64, 1, rows=count)
        if ((counts[what] < 0) | (counts[what] > sizes)).any():
            fail(str(path), f"{key}: a count below 0 or above the entries of its tensor")
    return TensorRows(
        sketch=sketch,
        norm=norm,
        **counts,
    )
