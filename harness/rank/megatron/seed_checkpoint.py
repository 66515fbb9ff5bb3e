"""The initial weights, the same for every layout: whole tensors by the names of the samples' rows.

Megatron-Core draws the weights of each pipeline stage anew, so layouts of the same seed start from
others. So one rank draws the whole model, and every rank of every job takes its entries of it.
The file is a distributed checkpoint of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from converge_harness.rank.megatron.parameters import Piece
from converge_harness.rank.recorder.placement import Held
from converge_harness.rank.recorder.rows import Fused, matrices
from converge_harness.rank.settings import KeyProblem, SettingError


class _Entries(NamedTuple):
    """The entries of a stored tensor that a rank has."""

    name: str
    stored: Held
    rows: torch.Tensor | None
    """Rows of the rank's parameter in which they are; None: all."""


def _entries(piece: Piece, fused: Mapping[str, Fused]) -> Iterator[_Entries]:
    parts = fused.get(piece.name)
    if parts is None:
        yield _Entries(piece.name, piece.held, None)
        return
    for matrix in matrices(parts, piece.held):
        yield _Entries(parts.names[matrix.number], matrix.held, matrix.rows)


def save_weights(folder: Path, pieces: Sequence[Piece], fused: Mapping[str, Fused]) -> None:
    """Write the weights of a model that one rank holds whole."""
    state: dict[str, torch.Tensor] = {}
    for piece in pieces:
        value = piece.parameter.detach()
        for name, _, rows in _entries(piece, fused):
            state[name] = value.clone() if rows is None else value[rows]
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@torch.no_grad()
def load_weights(folder: Path, pieces: Sequence[Piece], fused: Mapping[str, Fused]) -> None:
    """Fill every parameter of this rank with its entries of the stored tensors.

    Raises SettingError when the checkpoint is of another model.
    """
    wanted = [(piece, entries) for piece in pieces for entries in _entries(piece, fused)]
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {name: tuple(each.size) for name, each in stored.items() if hasattr(each, "size")}
    for _, (name, held, _rows) in wanted:
        if shapes.get(name) != held.whole:
            raise SettingError(
                KeyProblem(
                    "seed_checkpoint",
                    f"{folder} has {name} of shape {shapes.get(name)}, this model {held.whole}: "
                    "it is of another model",
                )
            )
    state = {
        name: torch.empty(held.whole, dtype=stored[name].properties.dtype)
        for _, (name, held, _rows) in wanted
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for piece, (name, held, rows) in wanted:
        mine = state[name].view(-1)[held.flat_index(0, held.numel, "cpu")].view(held.shape)
        value = piece.parameter.data
        value[slice(None) if rows is None else rows] = mine.to(value.device, value.dtype)
