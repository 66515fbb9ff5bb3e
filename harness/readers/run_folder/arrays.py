"""The ``.npz`` files of a run folder, with errors that name the file and the key.

``tensors/step-NNNNNNNN.npz`` (samples of tensors), ``frozen.npz`` (gradients at the initial
weights), ``activations.npz`` (what modules computed) and ``state/*.npz`` of a pass (checkpoints, as
saved and as loaded); docs/architecture.md.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from converge_harness.errors import EvidenceError
from converge_harness.model import (
    Activations,
    BufferRows,
    Floats,
    FrozenSamples,
    Integers,
    PostStepState,
    StateSample,
    TensorRows,
    TensorSample,
)
from converge_harness.readers.lines import fail
from converge_harness.run_folder import arrays as contract
from converge_harness.run_folder.arrays import (
    GRADIENTS,
    KEYS,
    PARAMETERS,
    PROJECTIONS,
    ROWS,
    SIGNS,
    UNKNOWN,
)
from converge_harness.run_folder.checkpoints import manifests
from converge_harness.run_folder.layout import (
    ACTIVATIONS,
    FROZEN,
    LOADED,
    SAMPLE,
    SAVED,
    STATE,
    TENSORS,
)
from converge_harness.store import read_json, upgraded


def read_samples(folder: Path) -> tuple[TensorSample, ...]:
    """The samples of a run folder, in the order of the steps; missing files are left out.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    samples = [read_sample(path) for path in sorted((folder / TENSORS).glob(f"{SAMPLE}-*.npz"))]
    return tuple(sorted(samples, key=lambda sample: sample.step))


def read_sample(path: Path) -> TensorSample:
    """Read one file; raises what ``read_samples`` raises."""
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
    """The state after clipping and the optimizer's step; None if the file does not have it."""
    if contract.CLIPPED_NORM not in arrays:
        return None
    clipped = array_of(path, arrays, contract.CLIPPED_NORM, np.float64, 1, rows=count)
    if (clipped < 0).any():
        fail(str(path), "clipped_norm: a negative number")
    return PostStepState(clipped, *states_of(path, arrays, count))


def _buffers(path: Path, arrays: Arrays) -> BufferRows | None:
    """The buffers; None if the file does not have them."""
    if contract.BUFFER_NAMES not in arrays:
        return None
    names = array_of(path, arrays, contract.BUFFER_NAMES, np.str_, 1)
    if not (names[:-1] < names[1:]).all():
        fail(str(path), "buffer_names: not unique and sorted names")
    sizes = array_of(path, arrays, contract.BUFFER_SIZES, np.int64, 1, rows=len(names))
    norm = array_of(path, arrays, contract.BUFFER_NORM, np.float64, 1, rows=len(names))
    sketch = array_of(path, arrays, contract.BUFFER_SKETCH, np.float64, 2, rows=len(names))
    if sketch.shape[1] != PROJECTIONS:
        fail(str(path), f"buffer_sketch: has {sketch.shape[1]} projections, must be {PROJECTIONS}")
    return BufferRows(tuple(names.tolist()), sizes, norm, sketch)


def read_frozen(folder: Path) -> FrozenSamples | None:
    """The frozen steps of a run folder; None if there are none.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    path = folder / FROZEN
    if not path.is_file():
        return None
    arrays = load_arrays(path)
    names, sizes = parameters_of(path, arrays)
    loss = array_of(path, arrays, contract.LOSS, np.float64, 1)
    count = len(loss)
    sketch = array_of(
        path, arrays, contract.row_key(GRADIENTS, contract.SKETCH), np.float64, 3, rows=count
    )
    norm = array_of(
        path, arrays, contract.row_key(GRADIENTS, contract.NORM), np.float64, 2, rows=count
    )
    digests = array_of(path, arrays, contract.BATCH_DIGESTS, np.str_, 1, rows=count)
    problems = array_of(path, arrays, contract.PROBLEMS, np.str_, 1)
    again = None  # files of older runs do not have it
    if contract.AGAIN_SKETCH in arrays:
        again = array_of(path, arrays, contract.AGAIN_SKETCH, np.float64, 2, rows=len(names))
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


def read_activations(folder: Path) -> Activations | None:
    """What modules computed in a run's first batches; None if it was not recorded.

    Raises EvidenceError naming file and key, StoreError for a newer file.
    """
    path = folder / ACTIVATIONS
    if not path.is_file():
        return None
    arrays = load_arrays(path)
    modules = array_of(path, arrays, contract.MODULES, np.str_, 1)
    count = len(modules)
    tensors = array_of(path, arrays, contract.TENSORS, np.str_, 1, rows=count)
    widths = array_of(path, arrays, contract.WIDTHS, np.int64, 1, rows=count)
    same_as = array_of(path, arrays, contract.SAME_AS, np.int64, 1, rows=count)
    if ((same_as < 0) | (same_as >= count)).any():
        fail(str(path), "same_as: is no row")
    forward, backward = (
        array_of(path, arrays, key, np.float64, 3) for key in (contract.FORWARD, contract.BACKWARD)
    )
    for key, values in ((contract.FORWARD, forward), (contract.BACKWARD, backward)):
        if values.shape != (len(forward), count, 3 + 6 * SIGNS):
            fail(str(path), f"{key}: has shape {values.shape}")
    return Activations(
        tuple(modules.tolist()), tuple(tensors.tolist()), widths, same_as, forward, backward
    )


def read_saved(folder: Path) -> tuple[StateSample, ...]:
    """The state at every checkpoint of a pass, in order; raises as ``read_state``."""
    samples = [read_state(path, SAVED) for path in (folder / STATE).glob(f"{SAVED}-*.npz")]
    return tuple(sorted(samples, key=lambda sample: sample.step))


def read_whole(folder: Path) -> tuple[int, ...]:
    """Steps of the checkpoints whose save returned in a pass, in order, according to manifests.

    Raises StoreError for a damaged or newer manifest.
    """
    found = manifests(folder)
    for path in found.values():
        read_json(path)
    return tuple(found)


def read_loaded(folder: Path) -> StateSample | None:
    """The state right after a pass's load; None if it loaded nothing, or died before.

    Raises what ``read_state`` raises, and EvidenceError for more than one, since a pass loads once.
    """
    paths = sorted((folder / STATE).glob(f"{LOADED}-*.npz"))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        fail(str(folder), f"holds {names}, but a pass loads once; run the job again")
    return read_state(paths[0], LOADED) if paths else None


def read_state(path: Path, prefix: str) -> StateSample:
    """Read one file, named after its prefix and step.

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
        lr=float(array_of(path, arrays, contract.LR, np.float64, 0)),
        trainer_step=_counter(path, arrays, contract.TRAINER_STEP),
        tokens_seen=_known(path, arrays, contract.TOKENS_SEEN),
        samples_consumed=_known(path, arrays, contract.SAMPLES_CONSUMED),
        buffers=_buffers(path, arrays),
        schedule_steps=(
            _known(path, arrays, contract.SCHEDULE_STEPS)
            if contract.SCHEDULE_STEPS in arrays
            else None
        ),
        random_states=_random_states(path, arrays),
    )


def _random_states(path: Path, arrays: Arrays) -> tuple[str, ...]:
    """Digests by rank; empty in files of older versions."""
    if contract.RANDOM_STATES not in arrays:
        return ()
    return tuple(array_of(path, arrays, contract.RANDOM_STATES, np.str_, 1).tolist())


def _sketches(path: Path, arrays: Arrays, norm: Floats) -> Floats:
    """Sketches of the optimizer's states: parameters x states x PROJECTIONS."""
    sketch: Floats = array_of(
        path, arrays, contract.STATE_SKETCH, np.float64, 3, rows=norm.shape[0]
    )
    if sketch.shape[1:] != (norm.shape[1], PROJECTIONS):
        fail(
            str(path),
            f"state_sketch: has shape {sketch.shape}, must be {(*norm.shape, PROJECTIONS)}",
        )
    if ((norm > 0) & ~sketch.any(axis=2)).any():
        fail(str(path), "state_sketch: is zero for a state whose norm is not 0")
    return sketch


def _known(path: Path, arrays: Arrays, key: str) -> int | None:
    """A counter; None if it is unknown, which is written as -1."""
    value = count_of(path, arrays, key)
    return None if value == UNKNOWN else _counter(path, arrays, key)


def _counter(path: Path, arrays: Arrays, key: str) -> int:
    value = count_of(path, arrays, key)
    if value < 0:
        fail(str(path), f"{key}: is {value}, a negative count")
    return value


Arrays = Mapping[str, npt.NDArray[Any]]


class Head(NamedTuple):
    """The arrays that every file has."""

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
    step = count_of(path, arrays, contract.STEP)
    named = re.fullmatch(rf"{prefix}-(\d{{8,}})\.npz", path.name)
    if named is None or int(named[1]) != step:
        fail(str(path), f"step is {step}, so its name should be {prefix}-{step:08}.npz")
    return Head(step, names, sizes)


def parameters_of(path: Path, arrays: Arrays) -> tuple[tuple[str, ...], Integers]:
    """Names and sizes of the parameters of a file."""
    names = array_of(path, arrays, contract.NAMES, np.str_, 1)
    if not len(names) or not (names[:-1] < names[1:]).all():
        fail(str(path), "names: not unique and sorted parameter names")
    sizes = array_of(path, arrays, contract.SIZES, np.int64, 1, rows=len(names))
    if (sizes < 0).any():
        fail(str(path), "sizes: a negative number of entries")
    return tuple(names.tolist()), sizes


def states_of(path: Path, arrays: Arrays, count: int) -> States:
    """Names, norms and counters of the optimizer's states of ``count`` parameters."""
    states = array_of(path, arrays, contract.STATE_NAMES, np.str_, 1)
    norm = array_of(path, arrays, contract.STATE_NORM, np.float64, 2, rows=count)
    if norm.shape[1] != len(states):
        fail(str(path), f"state_norm: has {norm.shape[1]} states, must have {len(states)}")
    steps = array_of(path, arrays, contract.STATE_STEPS, np.float64, 1, rows=count)
    for key in (contract.STATE_NORM, contract.STATE_STEPS):
        if (arrays[key] < 0).any():
            fail(str(path), f"{key}: a negative number")
    return States(tuple(states.tolist()), norm, steps)


def load_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The known arrays of a file, in the current schema; others are not read.

    Nothing is unpickled (that runs code) and nothing decompressed: our files store arrays
    uncompressed, so reading one takes no more memory than its size, whatever its headers claim.

    Raises EvidenceError for anything else.
    """
    if not zipfile.is_zipfile(path):
        fail(str(path), "is not an npz file; delete the run folder and run the job again")
    arrays, key = {}, "its list of arrays"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                key = entry.filename.removesuffix(".npy")
                if key in arrays:
                    fail(str(path), f"{entry.filename}: occurs twice")
                if key in KEYS:
                    arrays[key] = _array(path, archive, entry)
    except EvidenceError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged bytes make zipfile and numpy raise anything
        fail(str(path), f"{key}: cannot be read: {str(error) or type(error).__name__}")
    name = re.sub(r"-\d+\.npz$", ".npz", path.name)  # of all steps alike
    found = upgraded(path, name, {**arrays, "schema": count_of(path, arrays, "schema")})
    del found["schema"]
    return found


def _array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Read one array, after checking that its header fits the number of bytes."""
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
        # Elements without bytes could be any number of them. Objects have no size; numpy refuses
        # them.
        fits = entries * dtype.itemsize == there and entries <= there
        if not fits and not dtype.hasobject:
            raise ValueError(f"claims shape {shape} of {dtype} in {there:,} bytes")
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
        fail(str(path), f"{key}: is missing; the file has {', '.join(arrays) or 'nothing'}")
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
    """A scalar whole number."""
    return int(array_of(path, arrays, key, np.int64, 0))


def rows_of(path: Path, arrays: Arrays, kind: str, sizes: npt.NDArray[Any]) -> TensorRows:
    """Measurements of one kind of tensor, a row per parameter."""
    count = len(sizes)
    sketch = array_of(
        path, arrays, contract.row_key(kind, contract.SKETCH), np.float64, 2, rows=count
    )
    if sketch.shape[1] != PROJECTIONS:
        fail(str(path), f"{kind}_sketch: has {sketch.shape[1]} projections, must be {PROJECTIONS}")
    norm = array_of(path, arrays, contract.row_key(kind, contract.NORM), np.float64, 1, rows=count)
    if (norm < 0).any():
        fail(str(path), f"{kind}_norm: a negative norm")
    if ((norm > 0) & ~sketch.any(axis=1)).any():
        fail(str(path), f"{kind}_sketch: is zero for a tensor whose norm is not 0")
    counts = {}
    for what in ROWS[2:]:
        key = contract.row_key(kind, what)
        counts[what] = array_of(path, arrays, key, np.int64, 1, rows=count)
        if ((counts[what] < 0) | (counts[what] > sizes)).any():
            fail(str(path), f"{key}: a count that is negative or larger than its tensor")
    return TensorRows(
        sketch=sketch,
        norm=norm,
        **counts,
    )
