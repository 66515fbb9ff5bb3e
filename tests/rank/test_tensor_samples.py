"""Samples on real ranks: one file of the whole model's rows, whatever the shards."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from converge_harness.rank.recorder.buffers import BufferSampler
from converge_harness.rank.recorder.grad_norm import assign_shards, trainable
from converge_harness.rank.recorder.post_step_state import PostStepSampler
from converge_harness.rank.recorder.rows import assign_rows
from converge_harness.rank.recorder.tensor_samples import TensorSampler

CPU = torch.device("cpu")


class Model(nn.Module):
    """An embedding tied to the output, and a block that may be wrapped."""

    def __init__(self, wrap=lambda block: block):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.block = wrap(nn.Linear(6, 6))
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, tokens):
        return self.output(self.block(self.embedding(tokens)))


def trained(model):
    model(torch.arange(4)).square().sum().backward()
    return model


def samples_of(model, folder, optimizers=()):
    mine = folder if dist.get_rank() == 0 else None
    rows = assign_rows(assign_shards(trainable([model])), {}, CPU)
    after = PostStepSampler(rows, optimizers, CPU)
    return TensorSampler(rows, mine, CPU, after, BufferSampler([model], CPU))


def load(folder, step):
    with np.load(folder / f"step-{step:08d}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def leave_samples(folder):
    for name, wrap in (
        ("plain", lambda block: block),
        ("checkpointed", checkpoint_wrapper),
        ("compiled", lambda block: torch.compile(block, backend="eager")),
    ):
        model = Model(wrap)
        if name != "plain":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
        samples = samples_of(model, folder / name)
        samples.finish(0)
        with torch.compiler.set_stance("force_eager"):  # it is the wrapper's names that matter
            trained(model)
        samples.gradients()
        samples.finish(1)
        assert samples.problems == []


def test_sharded_wrapped_and_tied_models_leave_what_the_plain_one_leaves(tmp_path):
    for name in ("plain", "checkpointed", "compiled"):
        (tmp_path / name).mkdir()
    run_on_ranks(leave_samples, 2, tmp_path)
    plain = load(tmp_path / "plain", 1)
    assert plain["names"].tolist() == ["block.bias", "block.weight", "embedding.weight"]
    assert plain["sizes"].tolist() == [6, 36, 42]
    model = trained(Model())
    for kind, tensor in (
        ("parameters", model.embedding.weight),
        ("gradients", model.embedding.weight.grad),
    ):
        assert plain[f"{kind}_norm"][2] == pytest.approx(
            float(tensor.detach().double().norm()), rel=1e-14
        )
    for name in ("checkpointed", "compiled"):
        for step in (0, 1):
            expected, found = load(tmp_path / "plain", step), load(tmp_path / name, step)
            assert found["step"] == step
            assert found.keys() == expected.keys()
            for key, array in expected.items():
                if array.dtype == np.float64:  # gradients of two ranks are averaged in float32
                    assert np.allclose(found[key], array, rtol=0, atol=1e-5, equal_nan=True), (
                        name,
                        key,
                    )
                else:
                    assert np.array_equal(found[key], array), (name, key)
    assert "gradients_norm" not in load(tmp_path / "plain", 0)


class Weights(nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))


def odd_gradients(folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def sharded(value):
        return distribute_tensor(value, mesh, (Shard(0),))

    names = ("absent", "infinite", "partial", "right", "zero")
    model = Weights(**{name: sharded(torch.ones(3, 5)) for name in names})
    odd = torch.tensor([[1.0, math.inf], [math.nan, 0]])
    model.infinite.grad = sharded(odd.repeat(2, 3)[:3, :5])
    model.partial.grad = DTensor.from_local(torch.ones(3, 5), mesh, (Partial(),))
    model.right.grad = sharded(torch.full((3, 5), 2.0))
    model.zero.grad = sharded(torch.zeros(3, 5))
    samples = samples_of(model, folder)
    samples.gradients()
    problems = samples.problems
    assert len(problems) == 1
    assert problems[0].sentence.startswith("partial: gradient is an unreduced partial sum")
    samples.finish(1)


def test_a_gradient_that_cannot_be_counted_is_nan_and_one_that_is_absent_is_zero(tmp_path):
    run_on_ranks(odd_gradients, 2, tmp_path)
    sample = load(tmp_path, 1)
    rows = {name: row for row, name in enumerate(sample["names"].tolist())}
    norms = sample["gradients_norm"]
    assert norms[rows["absent"]] == norms[rows["zero"]] == 0
    assert norms[rows["right"]] == pytest.approx(2 * math.sqrt(15), rel=1e-15)
    assert np.isnan(norms[rows["partial"]])
    assert np.isnan(sample["gradients_sketch"][rows["partial"]]).all()
    by_name = dict.fromkeys(rows, (0, 0)) | {
        "absent": (15, 0),
        "zero": (15, 0),
        "infinite": (2, 7),
        "partial": (0, 15),
    }
    for name, (zeros, not_finite) in by_name.items():
        assert sample["gradients_zeros"][rows[name]] == zeros, name
        assert sample["gradients_not_finite"][rows[name]] == not_finite, name
    assert np.array_equal(sample["parameters_norm"], np.full(5, math.sqrt(15)))


def placed_unlike_its_placements(folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    rows = 1 + 2 * dist.get_rank()
    lying = DTensor.from_local(
        torch.ones(rows, 3), mesh, (Shard(0),), run_check=False, shape=(4, 3), stride=(3, 1)
    )
    samples = samples_of(Weights(weight=lying, plain=torch.ones(2)), folder)
    samples.finish(0)
    assert "do not say which entries" in samples.problems[0].sentence
    samples.finish(1)
    assert "did not clip" in samples.problems[-1].sentence


def test_a_shard_whose_entries_are_unknown_makes_its_row_nan(tmp_path):
    run_on_ranks(placed_unlike_its_placements, 2, tmp_path)
    sample = load(tmp_path, 0)
    assert sample["names"].tolist() == ["plain", "weight"]
    assert np.array_equal(np.isnan(sample["parameters_norm"]), [False, True])
    assert np.isnan(load(tmp_path, 1)["gradients_norm"]).all()  # nobody clipped


def pipeline_stages(folder):
    stage = dist.get_rank()
    model = Weights(**{f"stage{stage}": torch.full((2, 3), stage + 1.0)})
    samples_of(model, folder).finish(0)


def test_stages_make_one_table(tmp_path):
    run_on_ranks(pipeline_stages, 2, tmp_path)
    sample = load(tmp_path, 0)
    assert sample["names"].tolist() == ["stage0", "stage1"]
    assert np.allclose(sample["parameters_norm"], math.sqrt(6) * np.array([1, 2]), rtol=1e-15)
    assert not list(Path(tmp_path).glob("*.part"))
