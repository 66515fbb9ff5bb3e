"""Buffers on real ranks: each counted once, whatever their type and however many hold them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.sketch import Sketcher

CPU = torch.device("cpu")


def part(**buffers):
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value, persistent=name != "cache")
    return module


def arrays_of(samples):
    table = samples.finish(Sketcher(1 << 10, CPU))
    dist.all_reduce(table)
    return samples.arrays(table.numpy())


def row(found, name):
    return found["buffer_names"].tolist().index(name)


def stages_share_a_cache():
    """PP 2, of which rank 0 holds two stages: all have the cache, each a bias of its own."""
    rank = dist.get_rank()
    cache = torch.polar(torch.ones(3, 4), torch.linspace(0, 1, 12).view(3, 4))
    parts = [part(cache=cache, **{f"bias{rank}": torch.arange(3) + rank})]
    if rank == 0:
        parts.append(part(cache=cache.clone(), on=torch.tensor([True, False, True])))
    found = arrays_of(BufferSampler(parts, CPU))
    assert found["buffer_names"].tolist() == ["bias0", "bias1", "cache", "on"]
    assert found["buffer_sizes"].tolist() == [3, 3, 24, 3]
    squares = [0 + 1 + 4, 1 + 4 + 9, 12, 2]
    assert found["buffer_norm"] == pytest.approx(np.sqrt(squares), rel=1e-6)


def test_buffers_of_all_types_are_counted_once():
    run_on_ranks(stages_share_a_cache, 2)


def placed_or_plain():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))
    found = [
        arrays_of(BufferSampler([part(bias=bias)], CPU))
        for bias in (
            whole,
            distribute_tensor(whole, mesh, (Shard(0),)),
            distribute_tensor(whole, mesh, (Replicate(),)),
        )
    ]
    for other in found[1:]:
        for key in ("buffer_norm", "buffer_sketch"):
            assert np.allclose(other[key], found[0][key], rtol=1e-14, atol=1e-14)


def test_a_sharded_buffer_leaves_what_the_whole_one_leaves():
    run_on_ranks(placed_or_plain, 2)


def changed_after_attaching():
    model = part(kept=torch.ones(2), lost=torch.ones(2), new=torch.ones(2), other=torch.ones(2))
    samples = BufferSampler([model], CPU)
    model.new = torch.full((2,), 3.0)
    model.other = torch.ones(4)
    del model.lost
    found = arrays_of(samples)
    norms = {name: found["buffer_norm"][row(found, name)] for name in found["buffer_names"]}
    assert norms["kept"] == pytest.approx(2**0.5)
    assert norms["new"] == pytest.approx(18**0.5)
    assert np.isnan(norms["lost"])
    assert np.isnan(norms["other"])


def test_a_buffer_is_found_by_its_name_and_one_that_is_gone_is_nan():
    run_on_ranks(changed_after_attaching, 2)


def cut_by_hand():
    model = part(piece=torch.ones(2 + dist.get_rank()), whole=torch.ones(2))
    assert BufferSampler([model], CPU).names == ("whole",)
    assert arrays_of(BufferSampler([nn.Module()], CPU))["buffer_sketch"].shape == (0, 64)


def test_pieces_of_different_shapes_are_left_out():
    run_on_ranks(cut_by_hand, 2)


def complex_on_a_mesh():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cache = torch.polar(torch.ones(3, 4), torch.linspace(0, 1, 12).view(3, 4))
    plain = arrays_of(BufferSampler([part(cache=cache)], CPU))
    placed = distribute_tensor(cache, mesh, (Replicate(),))
    found = arrays_of(BufferSampler([part(cache=placed)], CPU))
    assert found["buffer_sketch"] == pytest.approx(plain["buffer_sketch"])
    cut = distribute_tensor(torch.view_as_real(cache), mesh, (Shard(0),))
    assert arrays_of(BufferSampler([part(cache=cut)], CPU))["buffer_names"].tolist() == ["cache"]


def test_a_complex_cache_that_tensor_parallelism_replicates_is_counted():
    run_on_ranks(complex_on_a_mesh, 2)
