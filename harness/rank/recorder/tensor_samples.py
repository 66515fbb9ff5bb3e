"""Per-tensor evidence of a sampled step, ``tensors/step-NNNNNNNN.npz``, and of frozen steps.

Each rank sketches the shards that it counts in the gradient norm; one sum over the ranks gives the
rows of the whole tensors, for any sharding. No tensor is ever gathered. Frozen steps are written to
``frozen.npz``, one entry per batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.grad_norm import placement_problem
from converge_harness.rank.recorder.placement import local_shard
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.rows import Rows, Shard
from converge_harness.rank.recorder.sketch import NOT_ZERO, SQUARES, WIDTH, Sketcher, folded
from converge_harness.run_folder import arrays as contract
from converge_harness.run_folder.arrays import frozen_steps, head, write_arrays
from converge_harness.run_folder.layout import FROZEN, SAMPLE, arrays_name
from converge_harness.run_folder.metrics import MeasuredDocument, Unmeasured

_SMALLEST_BLOCK = 1 << 16
"""Smallest number of entries sketched at a time: working memory of 0.7 MiB."""
_LARGEST_BLOCK = 1 << 22
_COLUMNS = contract.PROJECTIONS + 3
"""Columns of a parameter's row when it is summed over ranks: sketch, square, zeros, not finite."""

Table = npt.NDArray[np.float64]


class TensorSampler:
    """A rank's part of the samples; the writer also writes the file.

    For a tensor that cannot be counted, the row has NaN, no zeros and all entries not finite, and
    ``problems`` has a sentence.
    """

    def __init__(
        self,
        rows: Rows,
        folder: Path | None,
        device: torch.device,
        post_step: PostStepSampler,
        buffers: BufferSampler,
    ) -> None:
        """``folder`` is None except on the writer."""
        self.problems: list[Unmeasured] = []
        """Tensors that cannot be counted; the caller clears it."""
        self.rows = rows
        self._folder = folder
        self._post_step = post_step
        self._buffers = buffers
        self._sketcher = Sketcher(_block(shard.parameter for shard in rows.shards), device)
        self._gradients: torch.Tensor | None = None
        self._device = device

    @torch.no_grad()
    def gradients(self) -> None:
        """Sketch the current gradients. No collective happens here."""
        uncounted = dict(self.rows.unknown)
        values: list[tuple[Shard, torch.Tensor | None]] = []
        for shard in self.rows.shards:
            gradient = shard.parameter.grad
            problem = _gradient_problem(shard, gradient)
            if problem:
                uncounted[shard.row] = problem
            else:
                values.append((shard, None if gradient is None else local_shard(gradient)))
        self._gradients = self._rows(values, uncounted)

    @torch.no_grad()
    def gradients_of_all(self) -> Table:
        """The gradients sketched last, shape (rows, _COLUMNS). Collective over the world."""
        return sum_over_ranks([self._taken_gradients()])[0]

    def _taken_gradients(self) -> torch.Tensor:
        rows = self._gradients
        self._gradients = None
        if rows is None:
            self.problems.append(
                Unmeasured("gradients were not sampled: the trainer did not clip them")
            )
            shape = (len(self.rows.names), _COLUMNS)
            rows = torch.full(shape, torch.nan, dtype=torch.float64, device=self._device)
        return rows

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Sketch the parameters, add up all ranks' rows, write them. Collective over the world."""
        rows = {contract.PARAMETERS: self.parameter_rows()}
        if step > 0:
            rows[contract.GRADIENTS] = self._taken_gradients()
        added = [*rows.values()]
        states: tuple[str, ...] = ()
        if step > 0:
            states, state_rows = self._post_step.finish()
            added += [state_rows, self._buffers.finish(self._sketcher)]
        everyone = sum_over_ranks(added)
        if self._folder is None:
            return
        tables = dict(zip(rows, everyone, strict=False))
        arrays = self.arrays(step, tables)
        if step > 0:
            of_states, of_buffers = everyone[-2:]
            arrays |= self._post_step.arrays(states, of_states)
            arrays |= self._buffers.arrays(of_buffers)
        contract.write_arrays(self._folder / arrays_name(SAMPLE, step), arrays)

    @torch.no_grad()
    def parameter_rows(self) -> torch.Tensor:
        """This rank's summands of the rows of the current parameters. No collective."""
        values = [(shard, local_shard(shard.parameter)) for shard in self.rows.shards]
        return self._rows(values, self.rows.unknown)

    def buffer_rows(self, buffers: BufferSampler) -> torch.Tensor:
        """This rank's summands of the rows of some buffers. No collective."""
        return buffers.finish(self._sketcher)

    @torch.no_grad()
    def rows_of(self, kept: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
        """The same for a tensor per parameter, placed like the parameter; NaN if there is none.

        It is hashed by the row's name, like the parameter itself.
        """
        values: list[tuple[Shard, torch.Tensor | None]] = []
        absent: list[int] = []
        for shard in self.rows.shards:
            if not shard.numel:  # optimizers have no states for a shard without entries
                continue
            value = kept(shard.parameter)
            if value is None or placement_problem(shard.parameter, value):
                absent.append(shard.row)
            else:
                values.append((shard, local_shard(value)))
        rows = self._rows(values, self.rows.unknown)
        rows[absent] = torch.nan
        return rows

    def _rows(
        self,
        values: Iterable[tuple[Shard, torch.Tensor | None]],
        uncounted: Mapping[int, str],
    ) -> torch.Tensor:
        """This rank's summands: shape (rows, _COLUMNS), float64."""
        added = torch.zeros(len(self.rows.names), WIDTH, dtype=torch.float64, device=self._device)
        entries, not_finite = [0] * len(added), [0] * len(added)
        present = []
        for shard, value in values:
            entries[shard.row] += shard.numel
            if value is not None:
                chosen = shard.of(value)
                present += [(shard.row, part.hash, part.of(chosen)) for part in shard.parts]
        self._sketcher.add(present, added)
        finite = added[:, SQUARES].isfinite().tolist()
        for row, hashed, value in present:
            if not finite[row]:
                not_finite[row] += self._sketcher.not_finite(hashed, value)
        counts = added.new_tensor([entries, not_finite])
        rows = torch.cat(
            [
                folded(added),
                added[:, SQUARES, None],
                (counts[0] - added[:, NOT_ZERO])[:, None],
                counts[1][:, None],
            ],
            dim=1,
        )
        for row, problem in uncounted.items():
            rows[row] = torch.nan
            self.problems.append(Unmeasured(problem, self.rows.names[row]))
        return rows

    def arrays(self, step: int, tables: Mapping[str, Table]) -> dict[str, np.ndarray]:
        """The arrays of the file; ``tables`` has the whole tensors' rows by kind."""
        sizes = np.array(self.rows.sizes, dtype=np.int64)
        arrays = contract.head(self.rows.names, self.rows.sizes, step)
        for kind, table in tables.items():
            zeros, not_finite = (
                table[:, contract.PROJECTIONS + 1],
                table[:, contract.PROJECTIONS + 2],
            )
            counted = np.isfinite(zeros)
            arrays |= contract.rows(
                kind,
                sketch=table[:, : contract.PROJECTIONS],
                norm=np.sqrt(table[:, contract.PROJECTIONS]),
                zeros=np.where(counted, zeros, 0).astype(np.int64),
                not_finite=np.where(counted, not_finite, sizes).astype(np.int64),
            )
        return arrays


def sum_over_ranks(tables: Sequence[torch.Tensor]) -> list[Table]:
    """Add up tables with the same shapes on all ranks, in one reduction. Collective."""
    flat = world.add_up_(torch.cat([table.reshape(-1) for table in tables]))
    parts = flat.cpu().split([table.numel() for table in tables])
    return [part.view(table.shape).numpy() for part, table in zip(parts, tables, strict=True)]


def _gradient_problem(shard: Shard, gradient: torch.Tensor | None) -> str:
    """Why a gradient cannot be sketched; empty if it can, or if there is none."""
    if gradient is None:
        return ""
    problem = placement_problem(shard.parameter, gradient)
    shape = tuple(local_shard(gradient).shape)
    if not problem and not shard.held.fits(shape):
        return f"gradient's shard has shape {shape}, its parameter's {shard.held.shape}"
    return problem


def _block(parameters: Iterable[torch.Tensor]) -> int:
    """Entries to sketch at a time: working memory stays below the largest shard."""
    shards = (local_shard(parameter) for parameter in parameters)
    largest = max((shard.numel() * shard.element_size() for shard in shards), default=0)
    return max(_SMALLEST_BLOCK, min(largest // 16, _LARGEST_BLOCK))


class FrozenStepSampler:
    """Collects the frozen steps on every rank; one rank writes the file."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._gradients: list[Table] = []
        self._measured: list[MeasuredDocument] = []

    def add(self, gradients: Table, measured: MeasuredDocument) -> None:
        """Add a frozen step: the rows of its whole gradients, and the values of a step's line."""
        self._gradients.append(gradients)
        self._measured.append(measured)

    def write(self, folder: Path) -> None:
        """Write the file atomically. The last added step repeats the first batch.

        A loss that could not be measured is NaN.
        """
        *first, again = self._gradients
        *measured, _ = self._measured
        rows = np.stack(first)
        losses = [each["loss_recomputed"] for each in measured]
        problems = {each for some in self._measured for each in some.get("problems", ())}
        if self._measured[-1]["batch_digest"] != self._measured[0]["batch_digest"]:
            problems.add("the second pass over the first frozen batch had other samples")
        write_arrays(
            folder / FROZEN,
            head(self._rows.names, self._rows.sizes)
            | frozen_steps(
                sketch=rows[:, :, : contract.PROJECTIONS],
                norm=np.sqrt(rows[:, :, contract.PROJECTIONS]),
                loss=[math.nan if loss is None else loss for loss in losses],
                batch_digests=[each["batch_digest"] for each in measured],
                again=again[:, : contract.PROJECTIONS],
                problems=sorted(problems),
            ),
        )
