"""A program that starts from the checkpoint of another trainer's model, by a ``WeightMapping``.

Its weights are loaded by the names that the other trainer has for them, and its evidence has these
names. Rows of queries and keys have the order of the checkpoint there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from converge_harness.probe.errors import ProbeError
from converge_harness.probe.starting_weights import job_of
from converge_harness.probe.wrapping import Wrapped
from converge_harness.rank.recorder.flat_shard import FlatShard
from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.placement import Held, Piece
from converge_harness.rank.recorder.rows import Fused
from converge_harness.rank.settings import SettingError
from converge_harness.run_folder.job import RankJob
from converge_harness.run_folder.weight_mapping import WeightMapping

_FILE = "the file that trainers.NAME.weights names"
_loaded: set[str] = set()
"""Jobs whose seed checkpoint this process has loaded."""


@dataclass(frozen=True, slots=True)
class EvidenceNames:
    """The tensors of a probed model by the names that the evidence has for them."""

    parameters: Sequence[tuple[str, Any]]
    """As ``Wrapped.parameters``."""
    copies: Sequence[tuple[str, Any]]
    """As ``Wrapped.copies``."""
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Parameters whose rows have another order in the evidence."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """As ``TrainerView.module_names``."""


def load_seed_weights(model: torch.nn.Module, path: str) -> None:
    """Fill a model that is not wrapped yet from the job's seed checkpoint. Collective.

    Raises ProbeError if the job has none, if the mapping lacks a parameter, or if the checkpoint is
    of another model.
    """
    # Imports torch.distributed.checkpoint, which most probed programs never need.
    from converge_harness.rank.seed_checkpoint import load_weights

    job = job_of(path)
    if job.weights is None or job.seed_checkpoint is None:
        raise ProbeError(
            f"load_seed_checkpoint: {job.name} has no checkpoint to start from: put its set under "
            "[trainers.NAME] with weights (docs/across_frameworks.md), or leave the call out"
        )
    pieces, lengths = [], {}
    for full, parameter in model.named_parameters():
        name = canonical(full)
        if type(parameter) is not torch.nn.Parameter or parameter.is_meta:
            raise ProbeError(
                f"load_seed_checkpoint: {name} is sharded or has no values yet: call it once the "
                "model is on its device, and before anything wraps it"
            )
        whole = tuple(parameter.shape)
        held = Held(whole, tuple((range(size),) for size in whole))
        pieces.append(Piece(_named(job.weights, name), parameter, held))
        lengths[name] = _length(parameter)
    try:
        load_weights(job.seed_checkpoint, pieces, _reordered(job.weights, lengths), job.weights)
    except SettingError as error:
        raise ProbeError(f"load_seed_checkpoint: {error}") from error
    _loaded.add(path)


def evidence_names(wrapped: Wrapped, job: RankJob, path: str) -> EvidenceNames:
    """The names that the evidence has: those of the mapping, if the job has one.

    Raises ProbeError if the seed checkpoint was not loaded, if the mapping lacks a parameter, and
    for a model whose rows cannot be put in the order of the checkpoint.
    """
    mapping = job.weights
    if mapping is None:
        return EvidenceNames(wrapped.parameters, wrapped.copies)
    if path not in _loaded:
        raise ProbeError(
            f"{job.name} starts from the checkpoint of its control, which was not loaded: call "
            "converge_harness.probe.load_seed_checkpoint(model) before anything wraps the model"
        )
    lengths = {}
    for name, each in wrapped.parameters:
        if isinstance(each, FlatShard) and mapping.order_of_rows(name):
            raise ProbeError(
                f"{name}: rows of a model wrapped as {wrapped.wrapping} cannot be put in the order "
                "of the checkpoint: use DDP or FSDP 2, or no wrapper"
            )
        lengths[name] = _length(each)
    modules = {
        canonical(name): other
        for part in wrapped.modules
        for name, _ in part.named_modules()
        if (other := mapping.module(canonical(name))) is not None
    }
    return EvidenceNames(
        tuple((_named(mapping, name), each) for name, each in wrapped.parameters),
        tuple((_named(mapping, name), each) for name, each in wrapped.copies),
        _reordered(mapping, lengths),
        modules,
    )


def _named(mapping: WeightMapping, name: str) -> str:
    other = mapping.parameter(name)
    if other is None:
        raise ProbeError(
            f"{name} is a parameter of this model, and {_FILE} has no name for it: add it to "
            "[parameters] there"
        )
    return other


def _length(tensor: Any) -> int:
    """Size of the first dimension of a whole tensor; 1 for a scalar."""
    return int(tensor.shape[0]) if len(tensor.shape) else 1


def _reordered(mapping: WeightMapping, lengths: Mapping[str, int]) -> dict[str, Fused]:
    """Parameters whose rows have another order in the checkpoint, by their names there.

    ``lengths`` are the rows of the whole parameters, by their names in the model.
    """
    found = {}
    for name, length in lengths.items():
        order = mapping.order_of_rows(name)
        if not order:
            continue
        if length % len(order):
            raise ProbeError(
                f"{name} has {length} rows, no multiple of the {len(order)} that half_split says "
                f"in {_FILE}"
            )
        other = _named(mapping, name)
        found[other] = Fused((other,), len(order), (0,), {0: order})
    return found
