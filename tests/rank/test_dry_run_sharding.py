"""Parameters that are not sharded as the degrees say."""

import pytest
import titan_0_3_jobs as jobs

jobs.require_titan_0_3()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

from converge_harness.rank.dry_run.sharding import sharding_problems  # noqa: E402
from converge_harness.run_folder.job import Degrees  # noqa: E402


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=8)
    yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    dist.destroy_process_group()


def model(mesh, placements):
    layer = torch.nn.Linear(8, 8, bias=False)
    weight = layer.weight
    if placements is not None:
        weight = torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, placements))
    layer.weight = weight
    return [torch.nn.ModuleDict({"wq": layer})]


@pytest.mark.parametrize(
    ("placements", "problem"),
    [
        ((Shard(0), Shard(1)), None),
        ((Replicate(), Shard(1)), "wq.weight: is not in 4 shards of FSDP"),
        ((Shard(0), Replicate()), "wq.weight: is not in 2 shards of tensor parallelism"),
        (None, "wq.weight: is whole on every rank"),
    ],
)
def test_a_parameter_that_is_whole_where_degrees_shard_it_is_named(mesh, placements, problem):
    found = sharding_problems(model(mesh, placements), Degrees(dp_shard=2, cp=2, tp=2))
    assert [each.startswith(problem) for each in found] == ([True] if problem else [])
