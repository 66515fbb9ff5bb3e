"""The content of checkpoints as evidence: ``state/saved-…npz`` and ``state/loaded-…npz``.

Parameters, optimizer states and the buffers that are saved are sketched as whole tensors, states
with the hash of their parameter, so that what was saved with one sharding can be compared with what
was loaded with another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.post_step_state import PostStepSampler, states_of
from converge_harness.rank.recorder.tensor_samples import TensorSampler, sum_over_ranks
from converge_harness.run_folder.arrays import (
    CLIPPED_NORM,
    PARAMETERS,
    PROJECTIONS,
    UNKNOWN,
    checkpoint_states,
    write_arrays,
)
from converge_harness.run_folder.layout import arrays_name


@dataclass(frozen=True, slots=True)
class Counters:
    """The trainer's own counters of progress."""

    lr: float
    """The learning rate of the next optimizer step."""
    trainer_step: int
    tokens_seen: int
    """Summed over all ranks."""
    samples_consumed: int
    """Samples read by all ranks together; UNKNOWN if the loader does not provide it."""
    schedule_steps: int = UNKNOWN
    """Steps that the schedule of the learning rate has made; UNKNOWN if it is not seen."""


class StateSampler:
    """A rank's part of the evidence of checkpoints; on the writer, its files."""

    def __init__(
        self,
        tensors: TensorSampler,
        post_step: PostStepSampler,
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: BufferSampler,
        folder: Path | None,
    ) -> None:
        """``buffers`` are those that a checkpoint has; ``folder`` is None except on the writer."""
        self._tensors = tensors
        self._post_step = post_step
        self._optimizers = optimizers
        self._buffers = buffers
        self._folder = folder

    @torch.no_grad()
    def write(self, event: str, step: int, counters: Counters, random: Sequence[str]) -> None:
        """Sketch the current state. Collective over the world.

        Args:
            event: ``layout.SAVED`` or ``layout.LOADED``, the prefix of the file's name.
            step: of the checkpoint.
            counters: the current ones.
            random: of every rank, a digest of its random generators' states.
        """
        states, state_rows = self._post_step.finish()
        rows = [self._tensors.parameter_rows()]
        rows += [self._tensors.rows_of(self._kept(state)) for state in states]
        rows += [state_rows, self._tensors.buffer_rows(self._buffers)]
        parameters, *sketched, norms, buffers = sum_over_ranks(rows)
        if self._folder is None:
            return
        arrays = self._tensors.arrays(step, {PARAMETERS: parameters})
        arrays |= self._post_step.arrays(states, norms)
        del arrays[CLIPPED_NORM]  # meaningless here: there are no gradients after a load
        sketches = np.array([table[:, :PROJECTIONS] for table in sketched])
        shape = (len(states), len(parameters), PROJECTIONS)
        sketch = sketches.reshape(shape).swapaxes(0, 1)
        arrays |= checkpoint_states(sketch=sketch, **asdict(counters), random=random)
        arrays |= self._buffers.arrays(buffers)
        write_arrays(self._folder / arrays_name(event, step), arrays)

    def _kept(self, state: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
        kept = states_of(self._optimizers)
        return lambda parameter: kept.get(id(parameter), {}).get(state)
