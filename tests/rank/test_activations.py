"""What modules compute is summed in the same way however it is distributed over ranks."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from converge_harness.probe.loop import _is_compiled_whole
from converge_harness.rank.recorder import activations
from converge_harness.rank.recorder.activations import BATCHES, ActivationSampler
from converge_harness.rank.recorder.trainer_view import TrainerView
from converge_harness.run_folder.arrays import SIGNS

ENTRIES, SQUARES, SOME = 0, 1, 2
WHOLE, SHIFTED, HALF = (slice(3 + place * SIGNS, 3 + (place + 1) * SIGNS) for place in range(3))


class Block(nn.Module):
    """Two layers that read one input, as queries and keys do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(6, 4)

    def forward(self, x, *, scale):
        return self.first(x).tanh() * self.second(x) * scale


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(10, 6)
        self.block = block()
        self.head = nn.Linear(4, 5)

    def forward(self, tokens):
        hidden = self.block(self.embed(tokens), scale=torch.full((1, 1, 4), 2.0))
        return self.head(hidden)


TOKENS = torch.randint(10, (4, 7), generator=torch.Generator().manual_seed(1))


def view_of(*parts, tp_rank=0, tp_group=None, pieces=()):
    return TrainerView(
        model_parts=parts,
        dp_rank=0,
        first_of_dp=True,
        has_last_stage=True,
        tp_rank=tp_rank,
        tp_group=tp_group,
        vocab_size=10,
        device=torch.device("cpu"),
        optimizers=(),
        learning_rate=lambda: 0.1,
        pieces=dict(pieces),
    )


def recorded(folder, *parts, steps, frozen=0, **more):
    """The file's rows by name after the steps: batches x columns, forward and backward."""
    samples = ActivationSampler(view_of(*parts, **more), frozen, folder)
    for step in steps:
        samples.begin()
        step(samples)
        if samples.end_batch():
            samples.finish()
            break
    found = np.load(folder / "activations.npz")
    names = zip(found["modules"].tolist(), found["tensors"].tolist(), strict=True)
    return {
        name: (int(width), found["forward"][:, row], found["backward"][:, row])
        for row, (name, width) in enumerate(zip(names, found["widths"].tolist(), strict=True))
    }


def step_of(model, tokens=TOKENS):
    return lambda _samples: model(tokens).square().sum().backward()


def test_rows_are_in_the_order_of_the_calls(tmp_path):
    model = Model()
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    assert list(rows) == [
        ("embed", "out.0"),
        ("block", "in.0"),
        ("block", "in.scale"),
        ("block.first", "in.0"),
        ("block.first", "out.0"),
        ("block.second", "in.0"),
        ("block.second", "out.0"),
        ("block", "out.0"),
        ("head", "in.0"),
        ("head", "out.0"),
    ]
    width, forward, backward = rows["block.first", "out.0"]
    assert (width, forward.shape) == (4, (1, 3 + 6 * SIGNS))
    hidden = model.block.first(model.embed(TOKENS)).detach()
    assert forward[0, ENTRIES] == hidden.numel() == backward[0, ENTRIES]
    assert forward[0, SQUARES] == pytest.approx(float(hidden.square().sum()), rel=1e-6)


def test_a_sum_is_one_over_tokens_with_a_sign_per_column(tmp_path):
    model = Model()
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    sums = model.block.first(model.embed(TOKENS)).detach().sum((0, 1)).double()
    projections = rows["block.first", "out.0"][1][0, WHOLE]
    combinations = [
        float(sums @ torch.tensor(signs, dtype=torch.float64))
        for signs in np.array(np.meshgrid(*[[1, -1]] * 4)).reshape(4, -1).T
    ]
    for projection in projections:
        assert min(abs(projection - each) for each in combinations) < 1e-5


def test_half_of_the_vocabulary_shows_which_row_is_of_which_token(tmp_path):
    def exchanged(model):
        def swap(_module, _inputs, output):
            return output.flip(0)

        model.block.register_forward_hook(swap)
        return model

    right, wrong = Model(), exchanged(Model())
    rows, off = (recorded(tmp_path, model, steps=[step_of(model)]) for model in (right, wrong))
    (mine,), (its,) = (found["head", "out.0"][1] for found in (rows, off))
    assert 0 < mine[SOME] == its[SOME] < mine[ENTRIES]
    assert mine[WHOLE] == pytest.approx(its[WHOLE], rel=1e-5)
    assert np.abs(mine[HALF] - its[HALF]).max() > 1e-2 * np.abs(mine[HALF]).max()
    assert rows["block", "in.scale"][1][0, SOME] == 0  # of no token


def test_the_sequence_may_come_before_the_batch(tmp_path):
    class SequenceFirst(Model):
        def forward(self, tokens):
            hidden = self.block(self.embed(tokens).transpose(0, 1), scale=torch.full((1, 1, 4), 2))
            return self.head(hidden)

    rows, its = (
        recorded(tmp_path, each, steps=[step_of(each)]) for each in (Model(), SequenceFirst())
    )
    for name in (("block.first", "out.0"), ("head", "out.0")):
        for direction in (1, 2):
            assert rows[name][direction][0, SOME] > 0
            assert its[name][direction] == pytest.approx(rows[name][direction], rel=1e-4, abs=1e-4)


def test_a_weight_that_a_module_gets_is_no_activation(tmp_path):
    class Output(nn.Module):
        def forward(self, x, *, weight):
            return x @ weight.T

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 6), Output()

        def forward(self, tokens):
            return self.head(self.embed(tokens), weight=self.embed.weight)

    model = Tied()
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    assert list(rows) == [("embed", "out.0"), ("head", "in.0"), ("head", "out.0")]


def test_a_buffer_into_which_every_batch_is_copied_is_not_taken_for_the_first_one(tmp_path):
    model, buffer = Model(), TOKENS.clone()

    def batch(tokens):
        def train(_samples):
            buffer.copy_(tokens)
            model(buffer).square().sum().backward()

        return train

    second = TOKENS.flip(1)
    both = recorded(tmp_path, model, steps=[batch(TOKENS), batch(second)], frozen=2)
    alone = [recorded(tmp_path, model, steps=[step_of(model, each)]) for each in (TOKENS, second)]
    halves = [each["head", "out.0"][1][0, HALF] for each in alone]
    assert np.array_equal(both["head", "out.0"][1][:, HALF], halves)

    def of_two(_samples):  # microbatches of one batch
        for each in (TOKENS, second):
            batch(each)(_samples)

    (together,) = recorded(tmp_path, model, steps=[of_two])["head", "out.0"][1]
    assert together[HALF] == pytest.approx(sum(halves), rel=1e-9)


def test_a_tensors_gradient_is_in_its_first_row(tmp_path):
    model = Model()
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    names = list(rows)
    with np.load(tmp_path / "activations.npz") as found:
        first = [names[row] for row in found["same_as"].tolist()]
    shared = dict(zip(names, first, strict=True))
    for name in ("block", "block.first", "block.second"):
        assert shared[name, "in.0"] == ("embed", "out.0")
        assert not rows[name, "in.0"][2].any()
    assert shared["head", "in.0"] == ("block", "out.0")
    assert shared["block.first", "out.0"] == ("block.first", "out.0")
    embedded = model.embed(TOKENS).detach().requires_grad_()
    hidden = model.block(embedded, scale=torch.full((1, 1, 4), 2.0))
    model.head(hidden).square().sum().backward()
    gradient = rows["embed", "out.0"][2][0]
    assert gradient[SQUARES] == pytest.approx(float(embedded.grad.square().sum()), rel=1e-5)


def test_large_tensors_are_summed_in_blocks(tmp_path, monkeypatch):
    model = Model()
    whole = recorded(tmp_path, model, steps=[step_of(model)])
    monkeypatch.setattr(activations, "_BLOCK", 12)
    model = Model()
    blocks = recorded(tmp_path, model, steps=[step_of(model)])
    for name, (_, forward, backward) in whole.items():
        assert blocks[name][1] == pytest.approx(forward, rel=1e-5, abs=1e-5)
        assert blocks[name][2] == pytest.approx(backward, rel=1e-5, abs=1e-5)


def test_a_gradient_that_never_comes_is_zero(tmp_path):
    class Detached(Block):
        def forward(self, x, *, scale):
            return self.first(x).detach() * self.second(x.detach()) * scale

    model = Model(Detached)
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    for name in (("block.first", "out.0"), ("embed", "out.0")):
        gradient = rows[name][2][0]
        assert gradient[ENTRIES] == 1
        assert not gradient[SQUARES:].any()
    assert not rows["block.second", "in.0"][2].any()  # asks for no gradient
    assert rows["block.second", "out.0"][2][0, ENTRIES] == TOKENS.numel() * 4


def test_training_computes_the_same_bits(tmp_path):
    watched, plain = Model(), Model()
    recorded(tmp_path, watched, steps=[step_of(watched)])
    step_of(plain)(None)
    for mine, its in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    assert not any(module._forward_hooks for module in watched.modules())
    assert not any(module._forward_pre_hooks for module in watched.modules())


def test_only_the_first_frozen_batches_are_recorded(tmp_path):
    model = Model()
    rows = recorded(tmp_path, model, steps=[step_of(model)] * (BATCHES + 3), frozen=BATCHES + 2)
    assert len(rows["head", "out.0"][1]) == BATCHES


def test_what_is_paused_or_computed_again_is_not_counted(tmp_path):
    class Checkpointed(Block):
        def forward(self, x, *, scale):
            again = super().forward
            return checkpoint(lambda x: again(x, scale=scale), x, use_reentrant=False)

    def step(samples):
        samples.paused = True
        model(TOKENS)
        samples.paused = False
        model(TOKENS).square().sum().backward()

    model = Model(Checkpointed)
    rows = recorded(tmp_path, model, steps=[step])
    width, forward, backward = rows["block.first", "out.0"]
    assert forward[0, ENTRIES] == backward[0, ENTRIES] == TOKENS.numel() * width


def test_selective_checkpointing_stores_results_of_the_model_only(tmp_path):
    class Selective(Block):
        def forward(self, x, *, scale):
            again = super().forward
            contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
            inner = partial(again, scale=scale)
            return checkpoint(inner, x.flatten(0, 1), use_reentrant=False, context_fn=contexts)

        def __init__(self):
            super().__init__()
            for each in (self.first, self.second):
                each.bias = None  # so that each is a plain mm, which is stored

    watched, plain = Model(Selective), Model(Selective)
    rows = recorded(tmp_path, watched, steps=[step_of(watched)])
    step_of(plain)(None)
    for mine, its in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    assert rows["block.first", "out.0"][1][0, ENTRIES] == TOKENS.numel() * 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_validation_and_scripted_modules_are_not_looked_at(tmp_path):
    def step(_samples):
        model.eval()
        model(TOKENS)
        model.train()
        step_of(model)(None)

    model = Model()
    model.scripted = torch.jit.script(nn.Linear(2, 2))
    rows = recorded(tmp_path, model, steps=[step])
    assert rows["head", "out.0"][1][0, ENTRIES] == TOKENS.numel() * 5
    assert "scripted" not in {name for name, _ in rows}


def test_what_has_tokens_in_its_last_dimension_is_left_out(tmp_path):
    class Masked(Block):
        def forward(self, x, *, scale):
            self.inner(torch.zeros(4, 7, 7), torch.ones(28))
            return super().forward(x, scale=scale)

        def __init__(self):
            super().__init__()
            self.inner = Two()

    class Two(nn.Module):
        def forward(self, mask, scores):
            return scores

    model = Model(Masked)
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    assert not any(name == "block.inner" for name, _ in rows)


# Dynamo asks every input for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_module_stays_whole_and_is_compiled_once(tmp_path):
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph

    model = Model()
    model.block.compile(backend=backend, fullgraph=True)
    rows = recorded(tmp_path, model, steps=[step_of(model)])
    step_of(model)(None)
    assert len(compiled) == 1
    assert {name for name, _ in rows} == {"embed", "block", "head"}
    plain = Model()
    eager = recorded(tmp_path, plain, steps=[step_of(plain)])
    for name in rows:
        assert rows[name][1] == pytest.approx(eager[name][1], rel=1e-6)
        assert rows[name][2] == pytest.approx(eager[name][2], rel=1e-6)


def test_a_model_that_is_compiled_itself_leaves_no_file(tmp_path):
    model = Model()
    model.compile(backend="eager")
    with pytest.raises(FileNotFoundError):
        recorded(tmp_path, model, steps=[step_of(model)])


def test_a_tensor_that_cannot_be_summed_is_left_out(tmp_path):
    class Sparse(nn.Module):
        def forward(self, x):
            return x.to_sparse()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.sparse, self.linear = Sparse(), nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(self.sparse(x).to_dense())

    model = Around()
    rows = recorded(tmp_path, model, steps=[lambda _: model(torch.ones(2, 3)).sum().backward()])
    assert list(rows) == [("sparse", "in.0"), ("linear", "in.0"), ("linear", "out.0")]


def own(folder):
    """A folder for this rank, so that every rank can read what it wrote."""
    mine = folder / str(dist.get_rank())
    mine.mkdir(exist_ok=True)
    return mine


def halves_of_a_batch(folder):
    rank = dist.get_rank()
    model = Model()
    half = step_of(model, TOKENS[2 * rank : 2 * rank + 2])
    rows = recorded(own(folder), model, steps=[half])
    alone = Model()
    whole = ActivationSampler(view_of(alone), 0, None)
    whole.begin()
    step_of(alone)(whole)
    for which, direction in ((1, whole._forward), (2, whole._backward)):
        for name, mine in direction.items():
            found, expected = rows[name][which][0], mine.numpy()
            copies = 2 if name == ("block", "in.scale") else 1
            assert found[ENTRIES] == copies * expected[ENTRIES]
            assert found == pytest.approx(copies * expected, rel=1e-6, abs=1e-5)


def test_ranks_that_share_a_batch_add_up_to_it(tmp_path):
    run_on_ranks(halves_of_a_batch, 2, tmp_path)


def one_rank_has_no_modules(folder):
    model = Model() if dist.get_rank() == 0 else nn.ReLU()
    step = step_of(model) if dist.get_rank() == 0 else lambda _: None
    rows = recorded(own(folder), model, steps=[step])
    assert ("head", "out.0") in rows


def test_a_rank_without_modules_takes_part(tmp_path):
    run_on_ranks(one_rank_has_no_modules, 2, tmp_path)


class Cut(nn.Module):
    """What each rank holds of a row of 8: its half, as a plain tensor or as a DTensor."""

    def __init__(self, mesh=None):
        super().__init__()
        self.inner = nn.Identity()
        self.mesh = mesh

    def forward(self, x):
        if self.mesh is not None:
            return self.inner(distribute_tensor(x, self.mesh, (Shard(1),))).to_local()
        return self.inner(x.chunk(2, dim=1)[dist.get_rank()])


def parts_of_rows(folder):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rows = torch.arange(24.0).view(3, 8).requires_grad_()
    whole = nn.Sequential(nn.Identity())
    samples = ActivationSampler(view_of(whole), 0, None)
    samples.begin()
    whole(rows)
    expected = samples._forward["0", "out.0"].numpy()
    for cut, tp_rank, width in ((Cut(), rank, 4), (Cut(mesh), 0, 8)):
        found = recorded(own(folder), cut, steps=[lambda _, cut=cut: cut(rows)], tp_rank=tp_rank)
        assert found["inner", "out.0"][0] == width
        assert found["inner", "out.0"][1][0, SHIFTED] == pytest.approx(expected[WHOLE], rel=1e-9)
        assert found["inner", "out.0"][1][0, SQUARES] == pytest.approx(expected[SQUARES], rel=1e-9)


def test_parts_of_rows_are_counted_from_where_they_begin(tmp_path):
    run_on_ranks(parts_of_rows, 2, tmp_path)


class Gated(nn.Module):
    """What each rank holds of two matrices' columns: its half of the first, then of the second."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Identity()

    def forward(self, x):
        first, second = (each.chunk(2, dim=1)[dist.get_rank()] for each in x.chunk(2, dim=1))
        return self.fc1(torch.cat([first, second], dim=1))


def pieces_of_rows(folder):
    group = dist.group.WORLD
    rows = torch.arange(24.0).view(3, 8).requires_grad_()
    whole = nn.Sequential(nn.Identity())
    samples = ActivationSampler(view_of(whole), 0, None)
    samples.begin()
    whole(rows)
    expected = samples._forward["0", "out.0"].numpy()[WHOLE]
    for pieces, fits in (({"fc1": 2}, True), ({}, False)):
        part = Gated()
        found = recorded(
            own(folder),
            part,
            steps=[lambda _, part=part: part(rows)],
            tp_rank=dist.get_rank(),
            tp_group=group,
            pieces=pieces,
        )
        sums = found["fc1", "out.0"][1][0, SHIFTED]
        assert bool(np.allclose(sums, expected, rtol=1e-9)) == fits


def test_a_gated_layer_has_parts_of_both_its_matrices(tmp_path):
    run_on_ranks(pieces_of_rows, 2, tmp_path)


class Wrapper(nn.Module):
    """As DDP, around a program's own model."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("made", "whole"),
    [
        (lambda model: model, False),
        (lambda model: torch.compile(model, backend="eager"), True),
        (lambda model: torch.compile(Wrapper(model), backend="eager"), True),
        (lambda model: Wrapper(torch.compile(model, backend="eager")), True),
        (lambda model: compiled_in_place(Wrapper(model)), True),
        (compiled_in_place, True),
        (Wrapper, False),
    ],
)
def test_a_model_is_compiled_whole_by_a_wrapper_too(made, whole):
    model = Model()
    assert _is_compiled_whole(made(model), SimpleNamespace(modules=(model,))) is whole


def test_a_compiled_block_leaves_the_others():
    model = Model()
    model.block.compile(backend="eager")
    assert not _is_compiled_whole(model, SimpleNamespace(modules=(model,)))
