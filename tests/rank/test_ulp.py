"""``repeat = "ulp"``: every weight moved to a neighbour, the same neighbour in every sharding."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from converge_harness.rank.repeats import (
    direction,
    move_by_one_ulp,
    move_operator,
    round_in_repeat,
    round_otherwise,
)

SHAPE = (7, 5, 2)
DTYPES = (torch.bfloat16, torch.float32)


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.scale = torch.nn.Parameter(torch.ones(()))


def weights():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def moved(seed=1):
    layer = Layer(weights())
    move_by_one_ulp([layer], seed)
    return layer


def test_every_element_moves_by_exactly_one_unit():
    before, after = weights(), moved().weight.detach()
    up = torch.nextafter(before, torch.tensor(torch.inf))
    down = torch.nextafter(before, torch.tensor(-torch.inf))
    assert bool(((after == up) | (after == down)).all())
    assert 0.2 < float((after == up).double().mean()) < 0.8


def test_a_scalar_moves_too():
    assert abs(float(moved().scale.detach()) - 1) in (2**-23, 2**-24)


def test_the_direction_depends_on_the_name_and_the_seed():
    index = torch.arange(1000)
    first = direction("a", index, 1)
    assert 400 < int(first.sum()) < 600
    for other in (direction("b", index, 1), direction("a", index, 2)):
        assert 400 < int((first == other).sum()) < 600
    assert not torch.equal(moved(seed=1).weight, moved(seed=2).weight)


def test_weights_that_are_not_contiguous_move_too():
    layer = Layer(weights().permute(2, 1, 0))
    move_by_one_ulp([layer], 1)
    assert bool((layer.weight != weights().permute(2, 1, 0)).all())


def moved_shards(sizes, dims, placements):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=dims)
    layer = Layer(distribute_tensor(weights(), mesh, placements, src_data_rank=None))
    move_by_one_ulp([layer], 1)
    assert torch.equal(layer.weight.full_tensor(), moved().weight)


def all_shardings():
    moved_shards((dist.get_world_size(),), ("fsdp",), (Shard(0),))
    moved_shards((dist.get_world_size(),), ("tp",), (Shard(1),))
    moved_shards((2, 2), ("fsdp", "tp"), (Shard(0), Shard(1)))
    moved_shards((2, 2), ("fsdp", "tp"), (_StridedShard(0, split_factor=2), Shard(0)))
    moved_shards((2, 2), ("dp_replicate", "fsdp"), (Replicate(), Shard(0)))


def test_every_sharding_moves_to_the_same_weights():
    run_on_ranks(all_shardings, 4)


def grouped_product(rows, weights):
    """Rows of two groups, each times its own matrix, in the weights' dtype; and the gradients."""
    rows, weights = (each.detach().requires_grad_() for each in (rows, weights))
    ends = torch.tensor([8, 24], dtype=torch.int32)
    product = torch._grouped_mm(rows, weights, offs=ends)
    product.float().square().sum().backward()
    return product.detach(), rows.grad, weights.grad


def test_products_of_experts_are_rounded_otherwise_in_low_precision_alone(monkeypatch):
    """An ulp of float32 is lost in torchtitan's experts, which multiply in bfloat16."""
    monkeypatch.setattr(torch, "_grouped_mm", torch._grouped_mm)  # put back after the test
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 32, generator=generator)
    weights = torch.randn(2, 32, 64, generator=generator)
    before = {dtype: grouped_product(rows.to(dtype), weights.to(dtype)) for dtype in DTYPES}
    round_in_repeat("ulp", [], 1, 0)
    product, *gradients = grouped_product(rows.bfloat16(), weights.bfloat16())
    steps = product.view(torch.int16) - before[torch.bfloat16][0].view(torch.int16)
    assert steps.abs().max() == 1
    assert 0.12 < float((steps != 0).double().mean()) < 0.21
    for gradient, unmoved in zip(gradients, before[torch.bfloat16][1:], strict=True):
        off = (gradient - unmoved).float().norm() / unmoved.float().norm()
        assert 1e-4 < off < 1e-2
    # A block that is computed again for its backward pass, or a step after a resume.
    again = grouped_product(rows.bfloat16(), weights.bfloat16())
    assert all(map(torch.equal, again, (product, *gradients)))
    exact = grouped_product(rows, weights)
    assert all(map(torch.equal, exact, before[torch.float32]))


def test_what_experts_cast_to_float32_is_moved_and_other_float32_is_not():
    """Those of GPT-OSS add a bias in bfloat16 and return float32."""
    layer = torch.nn.Module()
    layer.experts, layer.dense = torch.nn.Identity(), torch.nn.Identity()
    round_in_repeat("ulp", [layer], 1, 0)
    values = weights()
    cast = values.bfloat16().float()
    share = float((layer.experts(cast) != cast).double().mean())
    assert 0.05 < share < 0.35
    assert torch.equal(layer.experts(values), values)
    assert torch.equal(layer.dense(cast), cast)


class Residual(torch.nn.Module):
    """A block that adds to its input, and returns more than the sum."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, values):
        return values + self.inner(0 * values), values


@pytest.mark.parametrize("listed", [torch.nn.ModuleList, torch.nn.Sequential])
def test_sums_of_blocks_are_rounded_otherwise_too(listed):
    """What the block's modules give is zero, and zeros stay."""
    model = torch.nn.Module()
    model.blocks = listed([Residual()]) if listed is torch.nn.ModuleList else listed(Residual())
    model.single = Residual()
    undo = round_otherwise([model], repeat_seed=1, dp_rank=0)
    values = weights().bfloat16()
    (block,) = model.blocks
    summed, more = block(values)
    assert 0.05 < float((summed != values).double().mean()) < 0.35
    assert torch.equal(more, values)
    assert torch.equal(model.single(values)[0], values)
    for each in undo:
        each()
    assert torch.equal(block(values)[0], values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_torch_compile_knows_what_the_operator_returns(dtype):
    move = move_operator(seed=1)
    rows = torch.randn(4, 6, 8, dtype=dtype)
    for values in (rows, rows.transpose(1, 2), rows[:, ::2], rows[:0], rows.bfloat16().to(dtype)):
        torch.library.opcheck(move, (values,), test_utils=("test_schema", "test_faketensor"))
        assert move(values).is_contiguous()


def test_a_nan_among_what_experts_return_hides_no_other_number():
    values = weights().bfloat16().float()
    values[0, 0, 0] = torch.nan
    moved = move_operator(seed=1)(values)
    assert moved[0, 0, 0].isnan()
    assert 0 < int((moved != values).sum()) < values.numel()
