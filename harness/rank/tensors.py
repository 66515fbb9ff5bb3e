"""Per-tensor evidence of a sampled step: ``tensors/step-NNNNNNNN.npz``.

Each rank sketches the shards that it counts in the gradient norm, and one sum over the ranks makes
the rows of the whole tensors, whatever the sharding. No tensor is ever gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from harness.rank import world
from harness.rank.after_update import AfterUpdate
from harness.rank.buffers import BufferSamples
from harness.rank.fused import Fused, matrices
from harness.rank.grad_norm import GradNorm, placement_problem
from harness.rank.placement import Held, HeldRun, PlacementError, held, local_shard
from harness.rank.sketch import (
    NOT_ZERO,
    SQUARES,
    SUMS,
    WIDTH,
    HashedPart,
    Sketcher,
    folded,
    hashed_parts,
)
from harness.rank.writer import SCHEMA, write_arrays

_SMALLEST_BLOCK = 1 << 16
"""Entries sketched at a time, at least: working memory of 0.7 MiB."""
_LARGEST_BLOCK = 1 << 22
_COLUMNS = SUMS + 3
"""Of a parameter's row when it is summed over ranks: sketch, square, zeros, not finite."""

Table = npt.NDArray[np.float64]


class _Shard(NamedTuple):
    """A shard that this rank counts, or what it holds of one of a parameter's matrices."""

    row: int
    parameter: torch.Tensor
    held: Held | HeldRun
    parts: tuple[HashedPart, ...]
    numel: int
    chosen: torch.Tensor | None = None
    """Rows of the shard; None: all."""

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.chosen is None else values[self.chosen]


class Rows(NamedTuple):
    """What has a row in a table."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shards: tuple[_Shard, ...]
    unknown: Mapping[int, str]
    """Rows of which this rank cannot tell what it holds, and why."""


class TensorSamples:
    """A rank's part of the samples; on the writer, their file.

    A tensor that cannot be counted has NaN in its row, no zeros, all entries not finite, and a
    sentence in ``problems``.
    """

    def __init__(
        self,
        norm: GradNorm,
        folder: Path | None,
        device: torch.device,
        after: AfterUpdate,
        buffers: BufferSamples,
        fused: Mapping[str, Fused] | None = None,
    ) -> None:
        """``norm`` says which shards this rank counts; ``folder`` is None but on the writer.

        ``fused``: parameters that hold several matrices, by canonical name, on this rank.
        """
        self.problems: list[str] = []
        """Tensors that cannot be counted, in sentences; the caller clears it."""
        self._norm = norm
        self._folder = folder
        self._after = after
        self._buffers = buffers
        shards: list[_Shard] = []
        unknown: dict[int, str] = {}
        for row, parameter in norm.owned:
            try:
                held_here = held(parameter)
            except PlacementError as error:
                unknown[row] = str(error)
            else:
                parts = hashed_parts(norm.names[row], held_here, device)
                shards.append(_Shard(row, parameter, held_here, parts, held_here.numel))
        self._whole = Rows(norm.names, norm.sizes, tuple(shards), unknown)
        self._fused = fused or {}
        self._matrices: Rows | None = None
        """Made where they are first asked for."""
        self._sketcher = Sketcher(_block(shard.parameter for shard in shards), device)
        self._gradients: torch.Tensor | None = None
        self._device = device

    @torch.no_grad()
    def gradients(self) -> None:
        """Sketch the gradients as they are now. No collective happens here."""
        self._gradients = self._gradient_rows(self._whole)

    @torch.no_grad()
    def gradients_by_matrix(self) -> None:
        """The same with a row for each matrix of fused parameters, and none for these."""
        self._gradients = self._gradient_rows(self.matrices)

    def _gradient_rows(self, wanted: Rows) -> torch.Tensor:
        uncounted = dict(wanted.unknown)
        values: list[tuple[_Shard, torch.Tensor | None]] = []
        for shard in wanted.shards:
            gradient = shard.parameter.grad
            problem = _gradient_problem(shard, gradient)
            if problem:
                uncounted[shard.row] = problem
            else:
                values.append((shard, None if gradient is None else local_shard(gradient)))
        return self._rows(wanted, values, uncounted)

    @torch.no_grad()
    def matrices_of_all(self) -> Table:
        """Shape (matrices, _COLUMNS): ``gradients_by_matrix`` of whole tensors.

        Collective over the world.
        """
        rows = self._gradients
        self._gradients = None
        if rows is None:
            self.problems.append("gradients were not sampled: the trainer did not clip them")
            rows = torch.full(
                (len(self.matrices.names), _COLUMNS),
                torch.nan,
                dtype=torch.float64,
                device=self._device,
            )
        return sum_over_ranks([rows])[0]

    @property
    def matrices(self) -> Rows:
        """Rows by matrix. Collective over the world where it is asked for first."""
        if self._matrices is None:
            self._matrices = self._divided(self._everyones_fused())
        return self._matrices

    def _everyones_fused(self) -> dict[str, Fused]:
        """Of all pipeline stages: every rank has a row for each."""
        everyones = world.everyones(self._fused)
        trained = set(self._whole.names)
        return {
            name: fused for some in everyones for name, fused in some.items() if name in trained
        }

    def _divided(self, everyones: Mapping[str, Fused]) -> Rows:
        whole = self._whole
        sizes = dict(zip(whole.names, whole.sizes, strict=True))
        for name, fused in everyones.items():
            size = sizes.pop(name)
            for number, matrix_name in enumerate(fused.names):
                sizes[matrix_name] = size * fused.pattern.count(number) // len(fused.pattern)
        names = tuple(sorted(sizes))
        place = {name: row for row, name in enumerate(names)}
        shards: list[_Shard] = []
        for shard in whole.shards:
            name = whole.names[shard.row]
            if name not in everyones:
                shards.append(shard._replace(row=place[name]))
                continue
            fused = everyones[name]
            if not isinstance(shard.held, Held):
                raise TypeError(f"the shard of {name}, which is fused, is a run of entries")
            for matrix in matrices(fused, shard.held):
                matrix_name = fused.names[matrix.number]
                parts = hashed_parts(matrix_name, matrix.held, self._device)
                rows = matrix.rows.to(self._device)
                row = place[matrix_name]
                shards.append(
                    shard._replace(row=row, parts=parts, numel=matrix.held.numel, chosen=rows)
                )
        unknown = {
            place[matrix]: why
            for row, why in whole.unknown.items()
            for name in [whole.names[row]]
            for matrix in (everyones[name].names if name in everyones else (name,))
        }
        return Rows(names, tuple(sizes[name] for name in names), tuple(shards), unknown)

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Sketch the parameters, add up all ranks' rows, write them. Collective over the world."""
        rows = {"parameters": self.parameter_rows()}
        if step > 0:
            if self._gradients is None:
                self.problems.append("gradients were not sampled: the trainer did not clip them")
                self._gradients = torch.full_like(rows["parameters"], torch.nan)
            rows["gradients"] = self._gradients
        self._gradients = None
        added = [*rows.values()]
        states: tuple[str, ...] = ()
        if step > 0:
            states, left = self._after.finish()
            added += [left, self._buffers.finish(self._sketcher)]
        everyone = sum_over_ranks(added)
        if self._folder is None:
            return
        tables = dict(zip(rows, everyone, strict=False))
        arrays = self.arrays(step, tables)
        if step > 0:
            arrays |= self._after.arrays(states, everyone[-2])
            arrays |= self._buffers.arrays(everyone[-1])
        write_arrays(self._folder / f"step-{step:08d}.npz", arrays)

    @torch.no_grad()
    def parameter_rows(self) -> torch.Tensor:
        """What this rank adds to the rows of the parameters as they are now. No collective."""
        whole = self._whole
        values = [(shard, local_shard(shard.parameter)) for shard in whole.shards]
        return self._rows(whole, values, whole.unknown)

    @torch.no_grad()
    def rows_of(self, kept: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
        """The same for a tensor that is kept for each parameter, placed as it is; NaN without one.

        It is hashed by the parameter's name, as the parameter itself.
        """
        values: list[tuple[_Shard, torch.Tensor | None]] = []
        absent: list[int] = []
        for shard in self._whole.shards:
            if not shard.held.numel:  # optimizers keep nothing for a shard without entries
                continue
            value = kept(shard.parameter)
            if value is None or placement_problem(shard.parameter, value):
                absent.append(shard.row)
            else:
                values.append((shard, local_shard(value)))
        rows = self._rows(self._whole, values, self._whole.unknown)
        rows[absent] = torch.nan
        return rows

    def _rows(
        self,
        wanted: Rows,
        values: Iterable[tuple[_Shard, torch.Tensor | None]],
        uncounted: Mapping[int, str],
    ) -> torch.Tensor:
        """Shape (rows, _COLUMNS), float64: what this rank adds to them."""
        added = torch.zeros(len(wanted.names), WIDTH, dtype=torch.float64, device=self._device)
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
            self.problems.append(f"{wanted.names[row]}: {problem}")
        return rows

    def arrays(self, step: int, tables: Mapping[str, Table]) -> dict[str, np.ndarray]:
        """The arrays of the file; ``tables`` has the whole tensors' rows by kind."""
        sizes = np.array(self._norm.sizes, dtype=np.int64)
        arrays = {
            "schema": np.array(SCHEMA),
            "step": np.array(step),
            "names": np.array(self._norm.names),
            "sizes": sizes,
        }
        for kind, table in tables.items():
            zeros, not_finite = table[:, SUMS + 1], table[:, SUMS + 2]
            counted = np.isfinite(zeros)
            arrays[f"{kind}_sketch"] = table[:, :SUMS]
            arrays[f"{kind}_norm"] = np.sqrt(table[:, SUMS])
            arrays[f"{kind}_zeros"] = np.where(counted, zeros, 0).astype(np.int64)
            arrays[f"{kind}_not_finite"] = np.where(counted, not_finite, sizes).astype(np.int64)
        return arrays


def sum_over_ranks(tables: Sequence[torch.Tensor]) -> list[Table]:
    """Add up tables of the same shapes on all ranks, in one reduction. Collective."""
    flat = world.add_up_(torch.cat([table.reshape(-1) for table in tables]))
    parts = flat.cpu().split([table.numel() for table in tables])
    return [part.view(table.shape).numpy() for part, table in zip(parts, tables, strict=True)]


def _gradient_problem(shard: _Shard, gradient: torch.Tensor | None) -> str:
    """Why a gradient cannot be sketched; empty when it can, or when there is none."""
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
