"""Evidence of what a checkpoint holds, on real ranks: it says nothing of the sharding."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from placements import DISTRIBUTED, SHAPES, distributed
from torch import nn

from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.checkpoint_state import Counters, StateSampler
from converge_harness.rank.recorder.grad_norm import assign_shards
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.rows import assign_rows
from converge_harness.rank.recorder.tensor_samples import TensorSampler
from converge_harness.run_folder.layout import SAVED

CPU = torch.device("cpu")
COUNTERS = Counters(lr=1e-3, trainer_step=3, tokens_seen=2**40, samples_consumed=-1)


def state_of(place, folder, *, forget=()):
    """The arrays that the writer leaves of a state which every placement starts from."""
    seeded = [torch.Generator().manual_seed(seed) for seed in range(len(SHAPES))]
    wholes = [torch.randn(s, generator=g) for s, g in zip(SHAPES, seeded, strict=True)]
    parameters = [nn.Parameter(place(whole)) for whole in wholes]
    optimizer = torch.optim.AdamW(parameters)
    for parameter, whole in zip(parameters, wholes, strict=True):
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": place(whole / 3),
            "exp_avg_sq": place(whole**2),
        }
    for number in forget:
        del optimizer.state[parameters[number]]
    norm = assign_shards([(f"p{number}", p) for number, p in enumerate(parameters)])
    rows = assign_rows(norm, {}, CPU)
    mine = folder if dist.get_rank() == 0 else None
    after = PostStepSampler(rows, [optimizer], CPU)
    tensors = TensorSampler(rows, None, CPU, after, BufferSampler([], CPU))
    model = nn.Module()
    model.register_buffer("seen", torch.full((3,), 2.0))
    model.register_buffer("table", torch.ones(3), persistent=False)
    buffers = BufferSampler([model], CPU, persistent=True)
    StateSampler(tensors, after, [optimizer], buffers, mine).write(SAVED, 3, COUNTERS, ("a1", "b2"))
    dist.barrier()
    with np.load(folder / "saved-step-00000003.npz") as arrays:
        return dict(arrays)


def states_of_all_placements(folder):
    whole = state_of(lambda tensor: tensor, folder / "whole")
    assert whole["state_names"].tolist() == ["exp_avg", "exp_avg_sq"]
    assert whole["state_sketch"].shape == (len(SHAPES), 2, 64)
    for name in DISTRIBUTED:
        found = state_of(lambda tensor, name=name: distributed(tensor, name), folder / name)
        assert found.keys() == whole.keys()
        for key, array in whole.items():
            if array.dtype.kind == "U":
                assert found[key].tolist() == array.tolist()
            else:
                assert found[key] == pytest.approx(array, rel=1e-12, abs=1e-12), (name, key)


def test_the_evidence_of_a_state_does_not_depend_on_its_sharding(tmp_path):
    run_on_ranks(states_of_all_placements, 4, tmp_path)


def forgotten_state(folder):
    found = state_of(lambda tensor: tensor, folder / "forgotten", forget=[1])
    assert np.isnan(found["state_sketch"][1]).all()
    assert np.isnan(found["state_norm"][1]).all()
    assert np.isnan(found["state_steps"][1])
    assert np.isfinite(found["parameters_sketch"]).all()
    assert np.isfinite(found["state_sketch"][[0, 2, 3]]).all()
    assert found["buffer_names"].tolist() == ["seen"]
    assert found["buffer_norm"].tolist() == pytest.approx([12**0.5])
    assert found["random_states"].tolist() == ["a1", "b2"]
    assert (found["lr"], found["tokens_seen"], found["samples_consumed"]) == (1e-3, 2**40, -1)


def test_a_state_that_is_not_there_is_no_number(tmp_path):
    run_on_ranks(forgotten_state, 2, tmp_path)
