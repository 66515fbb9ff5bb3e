"""``.npz`` files: named arrays, not compressed and not pickled.

``tensors/`` has a file per sampled step, ``frozen.npz`` the frozen steps, ``activations.npz`` what
modules computed, and ``state/`` of a pass the content of checkpoints. There is one function for
each group of arrays that belong together.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converge_harness.run_folder.documents import SCHEMA, write_bytes

PROJECTIONS = 64
"""Number of projections of every sketch."""
ROWS = ("sketch", "norm", "zeros", "not_finite")
"""The measurements of each tensor of a kind."""
PARAMETERS = "parameters"
GRADIENTS = "gradients"
SIGNS = 16
"""Number of projections of a module's sums."""
UNKNOWN = -1
"""An unknown counter of a checkpoint."""

KEYS = frozenset(
    {
        *("schema", "step", "names", "sizes"),
        *(f"{kind}_{what}" for kind in (PARAMETERS, GRADIENTS) for what in ROWS),
        *("clipped_norm", "state_names", "state_norm", "state_steps", "state_sketch"),
        *("buffer_names", "buffer_sizes", "buffer_norm", "buffer_sketch"),
        *("lr", "trainer_step", "tokens_seen", "samples_consumed"),
        *("schedule_steps", "random_states"),
        *("loss", "batch_digests", "problems", "again_sketch"),
        *("modules", "tensors", "widths", "same_as", "forward", "backward"),
    }
)
"""Names of all arrays in any of the files."""

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def head(names: Sequence[str], sizes: Sequence[int], step: int | None = None) -> Arrays:
    """The arrays that every file has: the rows' names and the entries of the whole tensors."""
    return {
        "schema": np.array(SCHEMA),
        **({} if step is None else {"step": np.array(step)}),
        "names": np.array(names),
        "sizes": np.array(sizes, dtype=np.int64),
    }


def rows(kind: str, *, sketch: Array, norm: Array, zeros: Array, not_finite: Array) -> Arrays:
    """Measurements of parameters or gradients, one row each."""
    return {
        f"{kind}_sketch": sketch,
        f"{kind}_norm": norm,
        f"{kind}_zeros": zeros,
        f"{kind}_not_finite": not_finite,
    }


def optimizer_states(states: Sequence[str], *, norm: Array, steps: Array) -> Arrays:
    """The optimizer's states that have a parameter's shape, and its own count of updates."""
    return {
        "state_names": np.array(states, dtype=np.str_),
        "state_norm": norm,
        "state_steps": steps,
    }


def buffers(names: Sequence[str], sizes: Sequence[int], *, norm: Array, sketch: Array) -> Arrays:
    """The buffers of the whole model."""
    return {
        "buffer_names": np.array(names, dtype=np.str_),
        "buffer_sizes": np.array(sizes, dtype=np.int64),
        "buffer_norm": norm,
        "buffer_sketch": sketch,
    }


def frozen_steps(
    *,
    sketch: Array,
    norm: Array,
    loss: Sequence[float],
    batch_digests: Sequence[str],
    again: Array,
    problems: Sequence[str],
) -> Arrays:
    """Gradients at the initial weights, an entry per batch; ``again`` repeats the first batch."""
    return {
        "gradients_sketch": sketch,
        "gradients_norm": norm,
        "loss": np.array(loss),
        "batch_digests": np.array(batch_digests),
        "again_sketch": again,
        "problems": np.array(problems, dtype=np.str_),
    }


def activations(
    *,
    modules: Sequence[str],
    tensors: Sequence[str],
    widths: Sequence[int],
    same_as: Sequence[int],
    forward: Array,
    backward: Array,
) -> Arrays:
    """What modules got and gave in some batches, and the gradients that flowed back.

    A row per tensor, in the order of the calls; ``forward`` and ``backward`` have the shape
    (batches, rows, 3 + 6 ``SIGNS``): entries, the sum of their squares, entries of those tokens
    that are in one half of the vocabulary, then projections of sums, of sums over that half and of
    sums of squares, each with the last dimension as if it began at the row's start and as if tensor
    parallelism cut it. A gradient that never came has one entry, which is zero. ``same_as`` is the
    first row of the same tensor, which has its gradient.
    """
    return {
        "schema": np.array(SCHEMA),
        "modules": np.array(modules, dtype=np.str_),
        "tensors": np.array(tensors, dtype=np.str_),
        "widths": np.array(widths, dtype=np.int64),
        "same_as": np.array(same_as, dtype=np.int64),
        "forward": forward,
        "backward": backward,
    }


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an ``.npz`` file atomically and sync it; make its folder."""
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()  # a zip is written in many small pieces, which is slow to a file
    np.savez(content, allow_pickle=False, **arrays)
    write_bytes(path, content.getbuffer())
