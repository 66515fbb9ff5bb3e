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
PARAMETERS = "parameters"
GRADIENTS = "gradients"
KINDS = (PARAMETERS, GRADIENTS)
SKETCH, NORM, ZEROS, NOT_FINITE = "sketch", "norm", "zeros", "not_finite"
ROWS = (SKETCH, NORM, ZEROS, NOT_FINITE)
"""The measurements of each tensor of a kind."""
SIGNS = 16
"""Number of projections of a module's sums."""
UNKNOWN = -1
"""An unknown counter of a checkpoint."""


def row_key(kind: str, what: str) -> str:
    """The name of the array of a measurement of parameters or gradients."""
    return f"{kind}_{what}"


_SCHEMA = "schema"
STEP = "step"
NAMES = "names"
SIZES = "sizes"
CLIPPED_NORM = "clipped_norm"
"""Norms of gradients after clipping."""
STATE_NAMES = "state_names"
STATE_NORM = "state_norm"
STATE_STEPS = "state_steps"
STATE_SKETCH = "state_sketch"
BUFFER_NAMES = "buffer_names"
BUFFER_SIZES = "buffer_sizes"
BUFFER_NORM = "buffer_norm"
BUFFER_SKETCH = "buffer_sketch"
LR = "lr"
TRAINER_STEP = "trainer_step"
TOKENS_SEEN = "tokens_seen"
SAMPLES_CONSUMED = "samples_consumed"
SCHEDULE_STEPS = "schedule_steps"
RANDOM_STATES = "random_states"
LOSS = "loss"
BATCH_DIGESTS = "batch_digests"
PROBLEMS = "problems"
AGAIN_SKETCH = "again_sketch"
MODULES = "modules"
TENSORS = "tensors"
WIDTHS = "widths"
SAME_AS = "same_as"
FORWARD = "forward"
BACKWARD = "backward"

KEYS = frozenset(
    {
        *(_SCHEMA, STEP, NAMES, SIZES),
        *(row_key(kind, what) for kind in KINDS for what in ROWS),
        *(CLIPPED_NORM, STATE_NAMES, STATE_NORM, STATE_STEPS, STATE_SKETCH),
        *(BUFFER_NAMES, BUFFER_SIZES, BUFFER_NORM, BUFFER_SKETCH),
        *(LR, TRAINER_STEP, TOKENS_SEEN, SAMPLES_CONSUMED),
        *(SCHEDULE_STEPS, RANDOM_STATES),
        *(LOSS, BATCH_DIGESTS, PROBLEMS, AGAIN_SKETCH),
        *(MODULES, TENSORS, WIDTHS, SAME_AS, FORWARD, BACKWARD),
    }
)
"""Names of all arrays in any of the files."""

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


def head(names: Sequence[str], sizes: Sequence[int], step: int | None = None) -> Arrays:
    """The arrays that every file has: the rows' names and the entries of the whole tensors."""
    return {
        _SCHEMA: np.array(SCHEMA),
        **({} if step is None else {STEP: np.array(step)}),
        NAMES: np.array(names),
        SIZES: np.array(sizes, dtype=np.int64),
    }


def rows(kind: str, *, sketch: Array, norm: Array, zeros: Array, not_finite: Array) -> Arrays:
    """Measurements of parameters or gradients, one row each."""
    return {
        row_key(kind, SKETCH): sketch,
        row_key(kind, NORM): norm,
        row_key(kind, ZEROS): zeros,
        row_key(kind, NOT_FINITE): not_finite,
    }


def optimizer_states(states: Sequence[str], *, norm: Array, steps: Array) -> Arrays:
    """The optimizer's states that have a parameter's shape, and its own count of updates."""
    return {
        STATE_NAMES: np.array(states, dtype=np.str_),
        STATE_NORM: norm,
        STATE_STEPS: steps,
    }


def buffers(names: Sequence[str], sizes: Sequence[int], *, norm: Array, sketch: Array) -> Arrays:
    """The buffers of the whole model."""
    return {
        BUFFER_NAMES: np.array(names, dtype=np.str_),
        BUFFER_SIZES: np.array(sizes, dtype=np.int64),
        BUFFER_NORM: norm,
        BUFFER_SKETCH: sketch,
    }


def checkpoint_states(
    *,
    sketch: Array,
    lr: float,
    trainer_step: int,
    tokens_seen: int,
    samples_consumed: int,
    schedule_steps: int,
    random: Sequence[str],
) -> Arrays:
    """Of a checkpoint: the optimizer's states (parameters, states, ``PROJECTIONS``), and progress.

    The counters are those of the trainer. ``random`` is of every rank a digest of the states of its
    random generators.
    """
    return {
        STATE_SKETCH: sketch,
        LR: np.array(lr),
        TRAINER_STEP: np.array(trainer_step),
        TOKENS_SEEN: np.array(tokens_seen),
        SAMPLES_CONSUMED: np.array(samples_consumed),
        SCHEDULE_STEPS: np.array(schedule_steps),
        RANDOM_STATES: np.array(random, dtype=np.str_),
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
        row_key(GRADIENTS, SKETCH): sketch,
        row_key(GRADIENTS, NORM): norm,
        LOSS: np.array(loss),
        BATCH_DIGESTS: np.array(batch_digests),
        AGAIN_SKETCH: again,
        PROBLEMS: np.array(problems, dtype=np.str_),
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
    """Inputs and outputs of modules in some batches, and their gradients.

    A row per tensor, in the order of the calls; ``forward`` and ``backward`` have the shape
    (batches, rows, 3 + 6 ``SIGNS``): entries, the sum of their squares, entries of those tokens
    that are in one half of the vocabulary, then projections of sums, of sums over that half and of
    sums of squares, each with the last dimension as if it began at the row's start and as if tensor
    parallelism cut it. A gradient that never came has one entry, which is zero. ``same_as`` is the
    first row of the same tensor, which has its gradient.
    """
    return {
        _SCHEMA: np.array(SCHEMA),
        MODULES: np.array(modules, dtype=np.str_),
        TENSORS: np.array(tensors, dtype=np.str_),
        WIDTHS: np.array(widths, dtype=np.int64),
        SAME_AS: np.array(same_as, dtype=np.int64),
        FORWARD: forward,
        BACKWARD: backward,
    }


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write an ``.npz`` file atomically and sync it; make its folder."""
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()  # a zip is written in many small pieces, which is slow to a file
    np.savez(content, allow_pickle=False, **arrays)
    write_bytes(path, content.getbuffer())
