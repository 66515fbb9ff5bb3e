"""Which part of the global batch a rank trains on, and which rank reports for it.

With data parallelism alone, every rank has a part of its own. Ranks that share a part by tensor or
context parallelism are found by the names of the dimensions of the parameters' meshes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from converge_harness.probe.errors import ProbeError
from converge_harness.rank.recorder import world

_OTHER = {"tp": "tp", "tensor": "tp", "cp": "cp", "sp": "cp", "context": "cp", "pp": "pp"}
"""By name of a mesh dimension along which ranks share samples, the degree that it is."""
_DATA = ("dp", "fsdp", "ddp", "hsdp", "data", "replicate", "shard", "batch", "ep")
"""Parts of the names of dimensions along which ranks have different samples."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinates."""

    dp_rank: int
    first_of_dp: bool
    """Whether it is the lowest rank with that part of the global batch."""
    tp_rank: int
    degrees: Mapping[str, int]
    """``dp_replicate dp_shard tp cp pp ep``."""


def coordinates(
    modules: Iterable[torch.nn.Module],
    degrees: Mapping[str, int],
    dp_rank: int | None,
    dp_degree: int | None,
) -> Coordinates:
    """This rank's coordinates. Collective over the world.

    ``degrees`` are those that the wrapping shows; ``dp_rank`` and ``dp_degree`` are the user's, or
    None. Raises ProbeError when they contradict each other, and when a mesh has dimensions with
    unknown names.
    """
    modules = list(modules)
    sizes, groups, tp_rank = _from_meshes(modules, said=dp_rank is not None)
    if (dp_rank is None) != (dp_degree is None):
        raise ProbeError("give Probe.from_env both dp_rank and dp_degree, or neither")
    if dp_rank is None or dp_degree is None:
        leaders = _leaders(world.everyones(groups))
        everyone = sorted(set(leaders))
        dp_rank, dp_degree = everyone.index(leaders[world.rank()]), len(everyone)
    said = world.everyones(dp_rank)
    if not 0 <= dp_rank < dp_degree or len(set(said)) != dp_degree:
        raise ProbeError(
            f"rank {world.rank()} says dp_rank={dp_rank} of dp_degree={dp_degree}, and all "
            f"{world.size()} ranks together say {sorted(set(said))}: each number from 0 to "
            "dp_degree - 1 must be some rank's"
        )
    first = said.index(dp_rank) == world.rank()
    found = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"), 1)
    found |= sizes
    found |= degrees
    found["dp_replicate"] = max(found["dp_replicate"], dp_degree // max(found["dp_shard"], 1))
    return Coordinates(dp_rank, first, tp_rank if groups else int(not first), found)


def _from_meshes(
    modules: Iterable[torch.nn.Module], *, said: bool
) -> tuple[dict[str, int], list[list[int]], int]:
    """Degrees, the groups of ranks that share samples with this one, and its position in tp's."""
    sizes: dict[str, int] = {}
    groups: list[list[int]] = []
    tp_rank = 0
    for where in _mesh_dims(modules):
        degree = _degree(where)
        if degree is None:
            if not said:
                raise ProbeError(_unknown(where))
            continue
        sizes[degree] = max(sizes.get(degree, 1), where.mesh.size(where.dim))
        if degree in _OTHER.values():
            groups.append(dist.get_process_group_ranks(where.mesh.get_group(where.dim)))
        if degree == "tp":
            tp_rank = where.mesh.get_local_rank(where.dim)
    return sizes, groups, tp_rank


@dataclass(slots=True)
class _MeshDim:
    """A dimension, with more than one rank, of a mesh of parameters."""

    parameter: str
    """One of them."""
    mesh: DeviceMesh
    dim: int
    fully_sharded: bool
    """Whether the parameters are in a model that FSDP 2 shards."""
    cuts: bool = False
    """Whether it shards some parameter."""


def _mesh_dims(modules: Iterable[torch.nn.Module]) -> list[_MeshDim]:
    found: dict[tuple[int, int], _MeshDim] = {}
    for module in modules:
        fully_sharded = any(isinstance(each, FSDPModule) for each in module.modules())
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                if mesh.size(dim) > 1:
                    new = _MeshDim(name, mesh, dim, fully_sharded)
                    where = found.setdefault((id(mesh), dim), new)
                    where.cuts |= not placement.is_replicate()
    return list(found.values())


def _degree(where: _MeshDim) -> str | None:
    """Which degree a mesh dimension is; None if its name does not say it."""
    names = where.mesh.mesh_dim_names
    name = names[where.dim].lower() if names else ""
    if name in _OTHER:
        return _OTHER[name]
    if name == "ep":
        return "ep"
    if any(word in name for word in _DATA) or (
        not names and where.fully_sharded and where.mesh.ndim == 1
    ):
        return "dp_shard" if where.cuts else "dp_replicate"
    return None


def _unknown(where: _MeshDim) -> str:
    dims = where.mesh.mesh_dim_names
    which = (
        f"dimension {dims[where.dim]!r}" if dims else f"dimension {where.dim}, which has no name,"
    )
    return (
        f"{where.parameter} is on a mesh whose {which} may or may not split samples between ranks. "
        f"Name the mesh's dimensions (known are {', '.join(sorted({*_OTHER, *_DATA}))}), or call "
        "Probe.from_env(..., dp_rank=…, dp_degree=…)"
    )


def _leaders(everyone: list[list[list[int]]]) -> list[int]:
    """Per rank, the lowest rank with which it shares samples, directly or through others."""
    leader = list(range(len(everyone)))
    moved = True
    while moved:
        moved = False
        for rank, groups in enumerate(everyone):
            lowest = min([leader[rank], *(leader[peer] for group in groups for peer in group)])
            if lowest < leader[rank]:
                leader[rank] = lowest
                moved = True
    return leader
