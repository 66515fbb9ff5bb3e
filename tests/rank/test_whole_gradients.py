"""Partial sums are whole while one looks, and as they were afterwards."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from converge_harness.rank.recorder.grad_norm import assign_shards, global_norm, whole_gradients


def partial_sums():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    norm = nn.Parameter(distribute_tensor(torch.ones(4), mesh, (Replicate(),)))
    matrix = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, (Shard(0),)))
    plain = nn.Parameter(torch.ones(3))
    mine = torch.full((4,), 1.0 + dist.get_rank())
    norm.grad = DTensor.from_local(mine, mesh, (Partial(),))
    matrix.grad = distribute_tensor(torch.ones(4, 2), mesh, (Shard(0),))
    before = norm.grad, matrix.grad
    counted = assign_shards([("norm", norm), ("matrix", matrix)])

    counted.take().numbers()
    told = [None, None]
    dist.all_gather_object(told, list(counted.problems))
    assert sorted(map(len, told)) == [0, 1]  # the one rank that counts the norm
    with whole_gradients([norm, matrix, plain]):
        assert norm.grad.placements == (Replicate(),)
        assert norm.grad.to_local().tolist() == [3.0] * 4
        assert matrix.grad is before[1]
        squares = counted.take().numbers()
        assert not counted.problems
    assert norm.grad is before[0]
    everyone = [None, None]
    dist.all_gather_object(everyone, squares)
    assert global_norm(everyone) == pytest.approx((4 * 9 + 8) ** 0.5)


def test_partial_sums_are_whole_for_a_look():
    run_on_ranks(partial_sums, 2)
