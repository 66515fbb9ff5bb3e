"""Global indices of a shard's entries: what the shards themselves hold is the expectation."""

import itertools

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from placements import DISTRIBUTED, SHAPES, distributed, fully_sharded, numbered
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from converge_harness.rank.recorder.placement import PlacementError, held, local_shard


def indices(tensor, block=5):
    """All global flat indices of a tensor's shard, found block by block."""
    parts = [index for _, index in held(tensor).blocks(block, "cpu")]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def check_distributed():
    for name, shape in itertools.product(DISTRIBUTED, SHAPES):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        tensor = distributed(whole, name)
        assert torch.equal(indices(tensor), tensor.to_local().flatten()), (name, shape)


def test_distributed_tensors():
    run_on_ranks(check_distributed, 4)


def check_fully_sharded(rows, columns, fsdp, tp, replicate):
    layer = fully_sharded(numbered(rows, columns), fsdp, tp, replicate)
    strided = 0
    for parameter in layer.parameters():
        strided += any(isinstance(p, _StridedShard) for p in parameter.placements)
        assert torch.equal(indices(parameter), local_shard(parameter).flatten().long())
    assert (strided > 0) == (tp > 1)


@pytest.mark.parametrize(
    ("rows", "columns", "fsdp", "tp", "replicate"),
    [
        (8, 8, 2, 2, 1),
        (10, 6, 2, 2, 1),  # uneven for FSDP within each TP shard
        (7, 5, 3, 2, 1),  # where DTensor's own reading of _StridedShard is not what FSDP2 did
        (9, 3, 1, 4, 1),  # TP alone, uneven
        (3, 5, 4, 1, 1),  # an empty shard
        (8, 6, 2, 1, 2),
        (8, 6, 2, 2, 2),
    ],
)
def test_fsdp_over_tensor_parallelism(rows, columns, fsdp, tp, replicate):
    ranks = fsdp * tp * replicate
    run_on_ranks(check_fully_sharded, ranks, rows, columns, fsdp, tp, replicate)


def test_a_plain_tensor_is_all_there():
    assert torch.equal(indices(torch.empty(3, 4)), torch.arange(12))
    assert torch.equal(indices(torch.empty(())), torch.arange(1))
    assert indices(torch.empty(0, 4)).numel() == 0


def not_passed():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    partial = DTensor.from_local(torch.zeros(4, 3), mesh, (Partial(),))
    with pytest.raises(PlacementError, match="neither a shard nor a replica"):
        held(partial)
    rows = 1 + 2 * dist.get_rank()  # no division of four rows gives one and three
    lying = DTensor.from_local(
        torch.zeros(rows, 3), mesh, (Shard(0),), run_check=False, shape=(4, 3), stride=(3, 1)
    )
    with pytest.raises(PlacementError, match="do not say which entries"):
        held(lying)


def test_shards_whose_entries_are_unknown_are_refused():
    run_on_ranks(not_passed, 2)
