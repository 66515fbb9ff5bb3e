"""Tensors placed on real meshes of four or eight gloo ranks, as trainers place them."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

DISTRIBUTED = {
    "fsdp": ((4,), (Shard(0),)),
    "ddp": ((4,), (Replicate(),)),
    "hsdp": ((2, 2), (Replicate(), Shard(0))),
    "columns": ((4,), (Shard(1),)),
    "rows_twice": ((2, 2), (Shard(0), Shard(0))),
    "rows_and_columns": ((2, 2), (Shard(0), Shard(1))),
    "strided": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "strided_columns": ((2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
    "sharded_then_replicated": ((2, 2), (Shard(1), Replicate())),
}
"""Mesh shape and placements for ``distribute_tensor``, on four ranks."""

SHAPES = ((7, 6, 2), (3, 10), (8, 8), (2, 1, 5))
"""None but (8, 8) divides evenly; four ranks leave some of (3, 10) and (2, 1, 5) with nothing."""


def distributed(whole, name):
    sizes, placements = DISTRIBUTED[name]
    names = tuple("abc"[: len(sizes)])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    # Every rank cuts its own shard out: torch cannot scatter strided shards that are uneven.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


class Layer(nn.Module):
    """Three weights whose first dimensions divide as asked, and a norm."""

    def __init__(self, rows, columns):
        super().__init__()
        self.up = nn.Linear(columns, rows)
        self.down = nn.Linear(rows, columns)
        self.norm = nn.LayerNorm(columns)

    def forward(self, x):
        return self.down(self.up(self.norm(x)))


def numbered(rows, columns):
    """A layer in which every entry is its own flat index."""
    layer = Layer(rows, columns)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return layer


def fully_sharded(layer, fsdp, tp, replicate=1):
    """FSDP2 (HSDP if ``replicate`` > 1) over tensor parallelism, as torchtitan applies them."""
    mesh = init_device_mesh(
        "cpu", (replicate, fsdp, tp), mesh_dim_names=("dp_replicate", "fsdp", "tp")
    )
    if tp > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
    fully_shard(layer, mesh=mesh["dp_replicate", "fsdp"] if replicate > 1 else mesh["fsdp"])
    return layer
