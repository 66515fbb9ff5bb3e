"""Arrays of our ``.npz`` files, with errors that name the file and the key."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import EvidenceError
from harness.model import Floats, Integers, TensorRows
from harness.readers.lines import fail
from harness.run_folder.arrays import KEYS, PROJECTIONS, ROWS
from harness.store import check_schema

Arrays = Mapping[str, npt.NDArray[Any]]


class Head(NamedTuple):
    """What every file begins with."""

    step: int
    names: tuple[str, ...]
    sizes: Integers


class States(NamedTuple):
    """The optimizer's states of every parameter."""

    names: tuple[str, ...]
    norm: Floats
    steps: Floats


def head_of(path: Path, arrays: Arrays, prefix: str) -> Head:
    """Schema, step and parameters of a file named ``PREFIX-NNNNNNNN.npz`` after its step."""
    names, sizes = parameters_of(path, arrays)
    step = count_of(path, arrays, "step")
    named = re.fullmatch(rf"{prefix}-(\d{{8,}})\.npz", path.name)
    if named is None or int(named[1]) != step:
        fail(str(path), f"step is {step}, so its name should be {prefix}-{step:08}.npz")
    return Head(step, names, sizes)


def parameters_of(path: Path, arrays: Arrays) -> tuple[tuple[str, ...], Integers]:
    """Names and sizes of the parameters of a file whose schema is checked."""
    check_schema(path, count_of(path, arrays, "schema"))
    names = array_of(path, arrays, "names", np.str_, 1)
    if not len(names) or not (names[:-1] < names[1:]).all():
        fail(str(path), "names: not unique and sorted parameter names")
    sizes = array_of(path, arrays, "sizes", np.int64, 1, rows=len(names))
    if (sizes < 0).any():
        fail(str(path), "sizes: a negative number of entries")
    return tuple(names.tolist()), sizes


def states_of(path: Path, arrays: Arrays, count: int) -> States:
    """Names, norms and counters of the optimizer's states of ``count`` parameters."""
    states = array_of(path, arrays, "state_names", np.str_, 1)
    norm = array_of(path, arrays, "state_norm", np.float64, 2, rows=count)
    if norm.shape[1] != len(states):
        fail(str(path), f"state_norm: has {norm.shape[1]} states, must have {len(states)}")
    steps = array_of(path, arrays, "state_steps", np.float64, 1, rows=count)
    for key in ("state_norm", "state_steps"):
        if (arrays[key] < 0).any():
            fail(str(path), f"{key}: a number below 0")
    return States(tuple(states.tolist()), norm, steps)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that we know; others are left unread.

    Nothing is unpickled (that runs code), and nothing unpacked: our files hold their arrays as they
    are, so reading one takes no more memory than its length, whatever it says of itself.

    Raises EvidenceError for what is no such file.
    """
    if not zipfile.is_zipfile(path):
        fail(str(path), "is no npz file; delete the run folder and run the job again")
    arrays, key = {}, "its list of arrays"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                key = entry.filename.removesuffix(".npy")
                if key in arrays:
                    fail(str(path), f"{entry.filename}: is there twice")
                if key in KEYS:
                    arrays[key] = _array(path, archive, entry)
    except EvidenceError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes make zipfile and numpy raise anything
        fail(str(path), f"{key}: cannot be read: {str(error) or type(error).__name__}")
    return arrays


def _array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """One array, whose header has to say how many bytes follow it before they are read."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
        fail(str(path), f"{entry.filename}: is compressed, which converge's own files never are")
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(stream)
        else:
            header = np.lib.format.read_array_header_2_0(stream)
        shape, _, dtype = header
        entries, there = math.prod(shape), entry.file_size - stream.tell()
        # Those of no bytes at all would be any number. Objects have no length; numpy refuses them.
        fits = entries * dtype.itemsize == there and entries <= there
        if not fits and not dtype.hasobject:
            raise ValueError(f"is said to hold {shape} of {dtype} in {there:,} bytes")
    with archive.open(entry) as stream:
        array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        return array


def array_of(
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


def count_of(path: Path, arrays: Arrays, key: str) -> int:
    """A whole number that stands by itself."""
    return int(array_of(path, arrays, key, np.int64, 0))


def rows_of(path: Path, arrays: Arrays, kind: str, sizes: npt.NDArray[Any]) -> TensorRows:
    """Measurements of one kind of tensor, a row per parameter."""
    count = len(sizes)
    sketch = array_of(path, arrays, f"{kind}_sketch", np.float64, 2, rows=count)
    if sketch.shape[1] != PROJECTIONS:
        fail(str(path), f"{kind}_sketch: has {sketch.shape[1]} projections, must be {PROJECTIONS}")
    norm = array_of(path, arrays, f"{kind}_norm", np.float64, 1, rows=count)
    if (norm < 0).any():
        fail(str(path), f"{kind}_norm: a norm below 0")
    if ((norm > 0) & ~sketch.any(axis=1)).any():
        fail(str(path), f"{kind}_sketch: is empty for a tensor whose norm is not 0")
    counts = {}
    for what in ROWS[2:]:
        key = f"{kind}_{what}"
        counts[what] = array_of(path, arrays, key, np.int64, 1, rows=count)
        if ((counts[what] < 0) | (counts[what] > sizes)).any():
            fail(str(path), f"{key}: a count below 0 or above the entries of its tensor")
    return TensorRows(
        sketch=sketch,
        norm=norm,
        **counts,
    )
