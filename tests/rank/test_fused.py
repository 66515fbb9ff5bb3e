"""Matrices that one parameter holds together are sampled as if each were a parameter."""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.grad_norm import assign_shards, trainable
from converge_harness.rank.recorder.placement import Held
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.rows import Fused, assign_rows, matrices
from converge_harness.rank.recorder.tensor_samples import TensorSampler, sum_over_ranks

CPU = torch.device("cpu")
HEAD, KV_HEADS, DIM = 2, 4, 5
FUSED = Fused(("wq", "wk", "wv"), HEAD, (0, 0, 1, 2))
"""Two heads of queries for one of keys and values."""
ROWS = HEAD * KV_HEADS * len(FUSED.pattern)


def divided(fused):
    """The three matrices of a whole fused one, as torchtitan's state dict divides it."""
    blocks = fused.reshape(KV_HEADS, len(FUSED.pattern), HEAD, -1)
    return [blocks[:, :2], blocks[:, 2], blocks[:, 3]]


def test_rows_of_a_shard_are_shared_out_in_the_order_of_each_matrix():
    held = Held((ROWS, DIM), ((range(3, 10), range(20, 22)), (range(DIM),)))
    whole = torch.arange(ROWS)
    mine = torch.cat([whole[3:10], whole[20:22]])
    for matrix, apart in zip(matrices(FUSED, held), divided(whole), strict=True):
        rows = apart.reshape(-1)
        places, _ = matrix.held.divided(1)
        found = rows[places.flat_index(0, places.numel, "cpu")]
        assert torch.equal(found, mine[matrix.rows])
    assert sum(matrix.held.numel for matrix in matrices(FUSED, held)) == 9 * DIM


def test_rows_of_another_order_are_those_of_the_matrix_in_its_own():
    turned = replace(FUSED, orders={0: (1, 0)})
    held = Held((ROWS, DIM), ((range(3, 10), range(20, 22)), (range(DIM),)))
    mine = torch.cat([torch.arange(3, 10), torch.arange(20, 22)])
    blocks = divided(torch.arange(ROWS))[0].reshape(-1, HEAD)
    expected = blocks.flip(1).reshape(-1)
    queries, keys, values = matrices(turned, held)
    places, _ = queries.held.divided(1)
    index = places.flat_index(0, places.numel, "cpu")
    assert torch.equal(expected[index], mine[queries.rows])
    assert torch.equal(index, index.sort().values)  # which sketches rely on
    for matrix, alike in zip((keys, values), matrices(FUSED, held)[1:], strict=True):
        assert matrix.held == alike.held
        assert torch.equal(matrix.rows, alike.rows)


class Weights(nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            parameter = nn.Parameter(value)
            parameter.grad = value.detach().clone()
            self.register_parameter(name, parameter)


def rows_of(model, fused):
    """Names, sizes, and rows of parameters and gradients with what the optimizer keeps."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": parameter.detach() / 3,
            "exp_avg_sq": parameter.detach() ** 2,
        }
    rows = assign_rows(assign_shards(trainable([model])), fused, CPU)
    after = PostStepSampler(rows, [optimizer], CPU)
    samples = TensorSampler(rows, None, CPU, after, BufferSampler([model], CPU))
    samples.gradients()
    gradients = samples.gradients_of_all()
    states, left = after.finish()
    added = [samples.parameter_rows(), samples.rows_of(lambda each: each), left]
    parameters, kept, norms = sum_over_ranks(added)
    assert np.allclose(parameters, kept, rtol=1e-12, atol=1e-12)
    after_update = after.arrays(states, norms)
    assert after_update.pop("state_names").tolist() == ["exp_avg", "exp_avg_sq"]
    assert samples.problems == []
    columns = [
        parameters,
        gradients,
        *(each.reshape(len(norms), -1) for each in after_update.values()),
    ]
    return rows.names, rows.sizes, np.concatenate(columns, axis=1)


def compare_shardings(folder):
    torch.manual_seed(0)
    fused, other = torch.randn(ROWS, DIM), torch.randn(3)
    apart = [matrix.reshape(-1, DIM) for matrix in divided(fused)]
    matrices_alone = Weights(other=other, **dict(zip(FUSED.names, apart, strict=True)))
    expected = rows_of(matrices_alone, {})
    assert expected[0] == ("other", "wk", "wq", "wv")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for placements in (
        None,
        (Shard(0), Shard(1)),
        (_StridedShard(0, split_factor=2), Shard(0)),
    ):
        held = fused if placements is None else distribute_tensor(fused, mesh, placements)
        found = rows_of(Weights(other=other, wqkv=held), {"wqkv": FUSED})
        assert found[:2] == expected[:2]
        assert np.allclose(found[2], expected[2], rtol=1e-12, atol=1e-12)
    # A rank that holds nothing fused, as another pipeline stage does, has the rows all the same.
    name = "here" if dist.get_rank() else "wqkv"
    model = Weights(other=other, **{name: fused if name == "wqkv" else other})
    names, _, table = rows_of(model, {"wqkv": FUSED} if name == "wqkv" else {})
    assert names == ("here", "other", "wk", "wq", "wv")
    assert np.allclose(table[2:], expected[2][1:], rtol=1e-12, atol=1e-12)


def test_their_rows_are_those_of_parameters_of_their_own_whatever_the_sharding(tmp_path):
    run_on_ranks(compare_shardings, 4, tmp_path)
