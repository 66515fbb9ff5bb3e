"""Checks that every parameter of a built trainer is sharded by all degrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from converge_harness.rank.recorder.names import canonical
from converge_harness.run_folder.job import Degrees

_REPLICATED_OVER_TP = ("router.gate.",)
"""2D weights that tensor parallelism replicates, because every rank does the same routing."""
_FSDP = ("fsdp", "dp_shard", "dp_shard_cp", "efsdp")
"""Mesh dimensions over which FSDP shards (``cp`` is folded into the first and the third)."""


def sharding_problems(parts: Iterable[torch.nn.Module], degrees: Degrees) -> list[str]:
    """One sentence per parameter of which a rank holds more than it should by the degrees."""
    return [
        f"{canonical(name)}: {why}"
        for part in parts
        for name, parameter in part.named_parameters()
        for why in _problems(canonical(name), parameter, degrees)
    ]


def _problems(name: str, parameter: torch.Tensor, degrees: Degrees) -> Iterator[str]:
    shards = degrees.dp_shard * degrees.cp
    experts = degrees.ep > 1 and ".experts." in f".{name}".replace("inner_experts", "experts")
    wide = parameter.dim() > 1 and not any(part in f"{name}." for part in _REPLICATED_OVER_TP)
    if not isinstance(parameter, DTensor):
        if shards > 1 or (degrees.tp > 1 and wide):
            yield f"is whole on every rank (a plain tensor of {tuple(parameter.shape)})"
        return
    sizes = _shards(parameter)
    if shards > 1 and not experts and max(sizes.get(dim, 1) for dim in _FSDP) != shards:
        yield f"is not in {shards} shards of FSDP (dp_shard x cp): {_placed(parameter)}"
    if degrees.tp > 1 and wide and not experts and sizes.get("tp", 1) != degrees.tp:
        yield f"is not in {degrees.tp} shards of tensor parallelism: {_placed(parameter)}"
    if experts and sizes.get("ep", 1) != degrees.ep:
        yield f"is not in {degrees.ep} shards of expert parallelism: {_placed(parameter)}"


def _shards(parameter: DTensor) -> dict[str, int]:
    """By mesh dimension, the number of shards of a parameter."""
    mesh = parameter.device_mesh
    names: Sequence[str] = mesh.mesh_dim_names or ()
    placed = zip(names, parameter.placements, strict=True)
    return {
        name: mesh.size(index)
        for index, (name, placement) in enumerate(placed)
        if placement.is_shard() or type(placement).__name__ == "_StridedShard"
    }


def _placed(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return ", ".join(
        f"{placement} over {mesh.size(index)} ranks of {name}"
        for index, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
    )
