"""What clipping and the optimizer left, on real ranks: norms of whole tensors."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from placements import DISTRIBUTED, SHAPES, distributed
from torch import nn

from converge_harness.rank.recorder.grad_norm import assign_shards
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.rows import assign_rows

CPU = torch.device("cpu")


def values(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arrays_of(named, *optimizers):
    """The arrays that the writer makes of all ranks' rows."""
    after = PostStepSampler(assign_rows(assign_shards(named), {}, CPU), optimizers, CPU)
    states, rows = after.finish()
    dist.all_reduce(rows)
    return after.arrays(states, rows.numpy())


def trained(parameters, steps):
    """AdamW after some steps with the same gradients; gradients halved at last, as by clipping."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    for _ in range(steps):
        optimizer.step()
    for parameter in parameters:
        parameter.grad.mul_(0.5)
    return optimizer


def with_gradients(place):
    parameters = [nn.Parameter(place(values(shape, seed))) for seed, shape in enumerate(SHAPES)]
    for seed, parameter in enumerate(parameters):
        parameter.grad = place(values(parameter.shape, 10 + seed))
    return parameters


def norms_of_placement(name):
    sharded = with_gradients(lambda whole: distributed(whole, name))
    found = arrays_of(
        [(f"p{number}", parameter) for number, parameter in enumerate(sharded)], trained(sharded, 3)
    )
    whole = with_gradients(lambda tensor: tensor)
    optimizer = trained(whole, 3)
    assert found["state_names"].tolist() == ["exp_avg", "exp_avg_sq"]
    for row, parameter in enumerate(whole):
        state = optimizer.state[parameter]
        expected = [float(state[name].double().norm()) for name in ("exp_avg", "exp_avg_sq")]
        assert found["clipped_norm"][row] == pytest.approx(
            float(parameter.grad.double().norm()), rel=1e-12
        )
        assert found["state_norm"][row] == pytest.approx(expected, rel=1e-6)
        assert found["state_steps"][row] == 3


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_norms_and_counters_are_those_of_the_whole_tensors(name):
    run_on_ranks(norms_of_placement, 4, name)


def nothing_there():
    parameters = with_gradients(lambda whole: distributed(whole, "fsdp"))
    kept, gone, reset = parameters[:3]
    optimizer = trained(parameters, 2)
    gone.grad = None
    if dist.get_rank() == 1:  # one rank's state is lost: the whole tensor's cannot be told
        optimizer.state.pop(reset)
    found = arrays_of([("gone", gone), ("kept", kept), ("reset", reset)], optimizer)
    assert np.isnan(found["clipped_norm"]).tolist() == [True, False, False]
    assert np.isnan(found["state_steps"]).tolist() == [False, False, True]
    assert np.isnan(found["state_norm"]).tolist() == [[False] * 2, [False] * 2, [True] * 2]


def test_what_is_gone_on_any_rank_is_nan():
    run_on_ranks(nothing_there, 4)


def stages_of_two_optimizers():
    """Rank 0 trains its stage with momentum alone, rank 1 with AdamW; nothing has copies."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.full((2, 3), 2.0)
    made = (
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9, foreach=False)
        if rank == 0
        else torch.optim.AdamW([parameter], lr=0.1, foreach=False)
    )
    made.step()
    found = arrays_of([(f"stage{rank}", parameter)], made)
    assert found["state_names"].tolist() == ["exp_avg", "exp_avg_sq", "momentum_buffer"]
    assert np.isnan(found["state_norm"]).tolist() == [[True, True, False], [False, False, True]]
    assert found["state_norm"][0, 2] == pytest.approx(2 * math.sqrt(6), rel=1e-12)
    assert np.isnan(found["state_steps"][0])  # SGD counts nothing
    assert found["state_steps"][1] == 1


def test_each_parameter_has_the_states_of_its_own_optimizer():
    run_on_ranks(stages_of_two_optimizers, 2)


def before_any_update():
    parameter = nn.Parameter(torch.ones(2, 3))
    found = arrays_of([("weight", parameter)], torch.optim.AdamW([parameter], lr=0.1))
    assert found["state_norm"].shape == (1, 0)
    assert np.isnan(found["state_steps"]).all()
    assert np.isnan(found["clipped_norm"]).all()


def test_an_optimizer_that_never_stepped_has_no_states():
    run_on_ranks(before_any_update, 2)


def one_shard_lags():
    parameters = with_gradients(lambda whole: distributed(whole, "fsdp"))
    optimizer = trained(parameters, 2)
    if dist.get_rank() == 0:
        optimizer.state[parameters[2]]["step"] -= 1
    found = arrays_of([("a", parameters[0]), ("b", parameters[2])], optimizer)
    assert found["state_steps"][0] == 2
    assert 1 < found["state_steps"][1] < 2


def test_a_counter_that_lags_on_one_rank_shows():
    run_on_ranks(one_shard_lags, 4)
