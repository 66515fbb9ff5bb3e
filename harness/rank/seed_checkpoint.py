"""The initial weights, the same for every layout: whole tensors by the names of the samples' rows.

Megatron-Core draws the weights of each pipeline stage anew, so layouts of the same seed start from
others. So one rank draws the whole model, and every rank of every job takes its entries of it.
The file is a distributed checkpoint of torch. It may also be that of another trainer's model, of
which a ``WeightMapping`` has the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.placement import Held, Piece
from converge_harness.rank.recorder.rows import Fused, matrices
from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.run_folder.weight_mapping import WeightMapping

_KEY = "seed_checkpoint"
_SHOWN = 3
"""Misfits that a message names."""


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
def load_weights(
    folder: Path,
    pieces: Sequence[Piece],
    fused: Mapping[str, Fused],
    mapping: WeightMapping | None = None,
) -> None:
    """Fill every parameter of this rank with its entries of the stored tensors.

    Collective over the world. ``mapping`` is that by whose names the pieces are called.

    Raises SettingError, on all ranks, unless all parameters are in the checkpoint, in their shapes,
    and all its weights are parameters.
    """
    wanted = [(piece, entries) for piece in pieces for entries in _entries(piece, fused)]
    stored = _stored(folder)
    of_model = {name: held.whole for _, (name, held, _rows) in wanted}
    _refuse(
        _misfits(
            {name: shape for each in world.everyones(of_model) for name, shape in each.items()},
            {name: tuple(each.size) for name, each in stored.items()},
            mapping,
        ),
        folder,
        mapping,
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


def _stored(folder: Path) -> dict[str, Any]:
    """What the checkpoint says of its tensors, by name.

    Raises SettingError when this torch cannot read that.
    """
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # what another torch pickled may raise anything
        message = (
            f"torch {torch.__version__} cannot read {folder} ({error}): if a newer torch wrote it, "
            "train its control in a toolchain of this torch"
        )
        raise SettingError(KeyProblem(_KEY, message)) from error
    return {name: each for name, each in stored.items() if hasattr(each, "size")}


_Shapes = Mapping[str, tuple[int, ...]]


def _misfits(of_model: _Shapes, stored: _Shapes, mapping: WeightMapping | None) -> Iterator[str]:
    """Clauses on parameters that the checkpoint lacks, and on weights that the model lacks."""
    for name, shape in sorted(of_model.items()):
        if name not in stored:
            yield f"it lacks {name} of shape {shape}"
        elif stored[name] != shape:
            yield f"it has {name} of shape {stored[name]}, this model {shape}"
    for name in sorted(stored.keys() - of_model.keys()):
        if mapping is None or not mapping.is_beside(name):
            yield f"it has {name} of shape {stored[name]}, which is no parameter of this model"


def _refuse(misfits: Iterable[str], folder: Path, mapping: WeightMapping | None) -> None:
    found = list(misfits)
    if found:
        shown = "; ".join(found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        by = " by the names that weights maps" if mapping else ""
        raise SettingError(KeyProblem(_KEY, f"{folder} is of another model{by}: {shown}{more}"))
