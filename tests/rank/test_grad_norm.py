"""The float64 gradient norm: each distinct shard counted once, whatever the placements."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from converge_harness.rank.recorder.cross_entropy import local_part
from converge_harness.rank.recorder.grad_norm import assign_shards, global_norm, shard_key

PLACEMENTS = {
    "fsdp": ((4,), ("fsdp",), (Shard(0),)),
    "ddp": ((4,), ("dp_replicate",), (Replicate(),)),
    "hsdp": ((2, 2), ("dp_replicate", "fsdp"), (Replicate(), Shard(0))),
    "fsdp_tp_rows": ((2, 2), ("fsdp", "tp"), (Shard(0), Shard(0))),
    "fsdp_tp_columns": ((2, 2), ("fsdp", "tp"), (Shard(0), Shard(1))),
    "tp_replicated": ((2, 2), ("fsdp", "tp"), (Shard(0), Replicate())),
}


def full_tensor(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3


def parameter_with_grad(mesh, placements, shape, seed):
    """A parameter and a gradient, placed the same."""
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, placements))
    parameter.grad = distribute_tensor(full_tensor(shape, seed), mesh, placements)
    return parameter


def recomputed(named):
    norm = assign_shards(named)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, norm.take().numbers())
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, norm.problems)
    return norm.names, rows, [problem for some in problems for problem in some]


def norm_of_placement(name):
    sizes, dims, placements = PLACEMENTS[name]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dims)
    shapes = {"a.weight": (7, 6), "b.weight": (3, 10)}  # 7 and 3 rows do not divide by 4
    named = [
        (key, parameter_with_grad(mesh, placements, shape, seed))
        for seed, (key, shape) in enumerate(shapes.items())
    ]
    # A plain tensor is a copy on every rank.
    plain = torch.nn.Parameter(torch.zeros(5))
    plain.grad = full_tensor((5,), 9)
    names, rows, problems = recomputed([*named, ("norm.weight", plain)])
    whole = [full_tensor(shape, seed) for seed, shape in enumerate(shapes.values())]
    whole.append(plain.grad)
    expected = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in whole))
    assert problems == []
    assert names == ("a.weight", "b.weight", "norm.weight")
    assert global_norm(rows) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_norm_is_that_of_the_full_tensors(name):
    run_on_ranks(norm_of_placement, 4, name)


def norm_over_pipeline_stages():
    """Ranks 0 and 1 hold the first stage, 2 and 3 the second, FSDP 2 in each."""
    pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    stage = pipeline.get_local_rank("pp")
    parameter = parameter_with_grad(pipeline["fsdp"], (Shard(0),), (4, 3), stage)
    names, rows, _ = recomputed([(f"layers.{stage}.weight", parameter)])
    expected = math.sqrt(sum(float(full_tensor((4, 3), s).double().square().sum()) for s in (0, 1)))
    assert names == ("layers.0.weight", "layers.1.weight")
    assert global_norm(rows) == pytest.approx(expected, rel=1e-14)


def test_pipeline_stages_add_up():
    run_on_ranks(norm_over_pipeline_stages, 4)


def partial_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = parameter_with_grad(mesh, (Replicate(),), (4, 3), 0)
    parameter.grad = DTensor.from_local(full_tensor((4, 3), 0), mesh, (Partial(),))
    _, rows, problems = recomputed([("wo.weight", parameter)])
    assert len(problems) == 1
    assert problems[0].sentence.startswith("wo.weight: gradient is an unreduced partial sum")
    assert global_norm(rows) == 0


def test_a_partial_gradient_is_named_and_not_summed():
    run_on_ranks(partial_gradient, 2)


def gradient_placed_otherwise():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = parameter_with_grad(mesh, (Replicate(),), (4, 3), 0)
    local = torch.nn.Parameter(torch.zeros(4, 3))
    local.grad = parameter.grad
    _, _, problems = recomputed([("w", local)])
    assert len(problems) == 1
    assert "gradient is placed" in problems[0].sentence


def test_a_gradient_that_is_placed_unlike_its_parameter_is_named():
    run_on_ranks(gradient_placed_otherwise, 2)


def test_a_missing_gradient_counts_nothing():
    run_on_ranks(missing_gradient, 2)


def missing_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    kept = parameter_with_grad(mesh, (Shard(0),), (4, 3), 0)
    lost = parameter_with_grad(mesh, (Shard(0),), (4, 3), 1)
    lost.grad = None
    names, rows, _ = recomputed([("kept", kept), ("lost", lost)])
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    assert sum(columns["kept"]) > 0
    assert sum(columns["lost"]) == 0


def test_a_plain_tensor_has_one_key_everywhere():
    assert shard_key("norm.weight", torch.zeros(3)) == ("norm.weight", ())


def entries_counted_by_each_rank(sizes, dims, placements):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dims)
    named = [
        (f"layers.{layer}.weight", parameter_with_grad(mesh, placements, (8, 3), layer))
        for layer in range(4)
    ]
    norm = assign_shards(named)
    mine = sum(local_part(parameter).numel() for _, parameter in norm.owned)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert everyone == [24, 24, 24, 24]


@pytest.mark.parametrize("name", ["ddp", "hsdp"])
def test_ranks_with_copies_share_the_counting(name):
    run_on_ranks(entries_counted_by_each_rank, 4, *PLACEMENTS[name])
