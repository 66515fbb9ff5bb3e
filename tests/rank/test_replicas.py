"""Replica agreement on real ranks: which copies are compared, and what is said of a difference."""

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from converge_harness.rank.recorder.replicas import KINDS, ReplicaCheck
from converge_harness.rank.recorder.trainer_view import TrainerView


class Layer(torch.nn.Module):
    """A matrix, a norm and, unless it is None, a buffer."""

    def __init__(self, weight, norm, buffer=None):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.norm = torch.nn.Parameter(norm)
        self.register_buffer("cache", buffer)


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def place(tensor, mesh, *placements):
    return distribute_tensor(tensor, mesh, placements)


def mesh_of(**dims):
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def fsdp_tp(buffer=None):
    """FSDP 2 x TP 2: the matrix is sharded by both, the norm a copy on both tp ranks."""
    mesh = mesh_of(fsdp=2, tp=2)
    weight = place(values(6, 4), mesh, Shard(0), Shard(1))
    return Layer(weight, place(values(6), mesh, Shard(0), Replicate()), buffer)


def hsdp():
    mesh = mesh_of(dp_replicate=2, fsdp=2)
    placements = (Replicate(), Shard(0))
    return Layer(place(values(5, 4), mesh, *placements), place(values(5), mesh, *placements))


def ddp():
    return Layer(values(6, 4), values(6), torch.arange(3))


class Checked:
    """A layer, its optimizer and their check, as if data parallelism spanned the whole world."""

    def __init__(self, layer, *more_parts):
        self.layer = layer
        self.optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, foreach=False)
        self.check = ReplicaCheck(
            TrainerView(
                model_parts=(layer, *more_parts),
                optimizers=(self.optimizer,),
                dp_rank=dist.get_rank(),
                first_of_dp=True,
                has_last_stage=True,
                tp_rank=0,
                tp_group=None,
                vocab_size=0,
                device=torch.device("cpu"),
                learning_rate=lambda: 0.0,
            )
        )

    def step(self, number=1, *, changed_gradient=None):
        """Gradients, the same on all copies but for ``changed_gradient()``, and one update."""
        for parameter in self.layer.parameters():
            parameter.grad = parameter.detach().clone()
        if changed_gradient:
            changed_gradient(self.layer)
        self.check.gradients()
        self.optimizer.step()
        return self.check.finish(number)


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_ranks(*ranks):
    return dist.get_rank() in ranks


def by_an_ulp(tensor):
    flat = local(tensor).view(-1)
    flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))


def differs(kind, tensor, mesh_dims, groups, **more):
    return {"kind": kind, "tensor": tensor, "mesh_dims": mesh_dims, "groups": groups, **more}


def counts(parameter=0, gradient=0, state=0, buffer=0):
    return dict(zip(KINDS, (parameter, gradient, state, buffer), strict=True))


# ------------------------------------------------------------------ what agrees


def copies_agree(make, at_start, after_a_step):
    checked = Checked(make())
    quiet = {"count": 0, "disagreements": []}
    assert checked.check.finish(0) == {"step": 0, "compared": at_start, **quiet}
    assert checked.step(1) == {"step": 1, "compared": after_a_step, **quiet}


@pytest.mark.parametrize(
    ("make", "at_start", "after_a_step"),
    [
        # Of the norm's two shards there are two copies each, of the matrix's four none.
        (fsdp_tp, counts(2), counts(2, 2, 2)),
        (hsdp, counts(4), counts(4, 4, 4)),
        (ddp, counts(2, buffer=1), counts(2, 2, 2, buffer=1)),
    ],
)
def test_copies_that_agree_are_counted(make, at_start, after_a_step):
    run_on_ranks(copies_agree, 4, make, at_start, after_a_step)


def nothing_has_copies():
    mesh = mesh_of(fsdp=4)
    layer = Layer(place(values(8, 4), mesh, Shard(0)), place(values(6), mesh, Shard(0)))
    checked = Checked(layer)
    by_an_ulp(layer.weight)  # no copy, so nothing to agree with
    assert checked.step(1)["compared"] == counts()


def test_with_fsdp_alone_nothing_is_compared():
    run_on_ranks(nothing_has_copies, 4)


def stages_and_their_buffers():
    """PP 2: parameters have no copies, both stages have the cache, rank 0 has it twice."""
    rank = dist.get_rank()
    parts = [torch.nn.ModuleDict({f"layer{rank}": Layer(values(2, 2), values(2))})]
    parts += [torch.nn.Module() for _ in range(2 - rank)]
    for part in parts[1:]:
        part.register_buffer("cache", values(3))
    checked = Checked(*parts)
    assert checked.step(1)["compared"] == counts(buffer=1)
    if rank == 0:
        by_an_ulp(parts[2].cache)
    expected = differs("buffer", "cache", ["dp_replicate"], [[0], [1]])
    assert checked.step(2)["disagreements"] == [expected]


def test_copies_of_pipeline_stages_are_buffers_only():
    run_on_ranks(stages_and_their_buffers, 2)


# ---------------------------------------------------------------- what differs


def one_tp_copy_differs():
    checked = Checked(fsdp_tp())
    if on_ranks(3):
        by_an_ulp(checked.layer.norm)
    found = checked.check.finish(0)
    assert found["count"] == 1
    # Ranks 0 and 1 hold the other shard, whose copies agree.
    assert found["disagreements"] == [differs("parameter", "norm", ["tp"], [[2], [3]])]


def test_a_norm_weight_that_drifts_on_one_tp_rank_is_named():
    run_on_ranks(one_tp_copy_differs, 4)


def one_replica_differs():
    checked = Checked(hsdp())
    if on_ranks(2, 3):
        by_an_ulp(checked.layer.weight)
    (found,) = checked.check.finish(0)["disagreements"]
    assert found == differs("parameter", "weight", ["dp_replicate"], [[0], [1], [2], [3]])


def test_a_replica_that_drifts_under_hsdp_is_named():
    run_on_ranks(one_replica_differs, 4)


def one_of_four_copies_differs():
    mesh = mesh_of(dp_replicate=2, tp=2)
    checked = Checked(Layer(*(place(values(4), mesh, Replicate(), Replicate()) for _ in "wn")))
    if on_ranks(1):
        by_an_ulp(checked.layer.norm)
    if on_ranks(1, 3):
        by_an_ulp(checked.layer.weight)
    assert checked.check.finish(0)["disagreements"] == [
        differs("parameter", "norm", ["dp_replicate", "tp"], [[0, 2, 3], [1]]),
        differs("parameter", "weight", ["tp"], [[0, 2], [1, 3]]),
    ]


def test_as_many_mesh_dimensions_are_named_as_it_takes():
    run_on_ranks(one_of_four_copies_differs, 4)


def plain_copies_differ():
    checked = Checked(ddp())
    if on_ranks(1):
        weight = local(checked.layer.weight)
        weight[[0, 5]] = weight[[5, 0]].clone()
        checked.layer.cache[0] = 1
    assert checked.check.finish(0)["disagreements"] == [
        differs("parameter", "weight", ["dp_replicate"], [[0], [1]]),
        differs("buffer", "cache", ["dp_replicate"], [[0], [1]]),
    ]


def test_swapped_rows_and_a_buffer_show_under_ddp():
    run_on_ranks(plain_copies_differ, 2)


def unreduced_gradient():
    checked = Checked(fsdp_tp())

    def leave_partial(layer):
        part = torch.full((3,), float(dist.get_rank()))
        layer.norm.grad = DTensor.from_local(part, layer.norm.device_mesh, (Shard(0), Partial()))

    for parameter in checked.layer.parameters():
        parameter.grad = parameter.detach().clone()
    leave_partial(checked.layer)
    checked.check.gradients()
    found = checked.check.finish(1)
    assert found["compared"] == counts(2, 2)
    assert found["disagreements"] == [differs("gradient", "norm", ["tp"], [[0], [1], [2], [3]])]


def test_a_gradient_that_was_not_reduced_is_named():
    run_on_ranks(unreduced_gradient, 4)


def gradient_of_one_rank_only():
    checked = Checked(ddp())

    def lose(layer):
        if on_ranks(0):
            layer.norm.grad = None

    found = checked.step(1, changed_gradient=lose)
    assert found["count"] == 3
    assert found["disagreements"] == [
        differs("parameter", "norm", ["dp_replicate"], [[0], [1]]),
        differs("gradient", "norm", ["dp_replicate"], [[0], [1]]),
        differs(
            "optimizer state",
            "norm",
            ["dp_replicate"],
            [[0], [1]],
            states=["exp_avg", "exp_avg_sq", "step"],
        ),
    ]


def test_a_gradient_that_one_rank_lacks_is_named_with_all_that_follows():
    run_on_ranks(gradient_of_one_rank_only, 2)


def optimizer_state_differs():
    checked = Checked(fsdp_tp())
    checked.step(1)
    if on_ranks(0):
        by_an_ulp(checked.optimizer.state[checked.layer.norm]["exp_avg_sq"])
        by_an_ulp(checked.optimizer.state[checked.layer.weight]["exp_avg"])  # has no copy
    expected = differs("optimizer state", "norm", ["tp"], [[0], [1]], states=["exp_avg_sq"])
    found = checked.check.finish(1)
    assert found["compared"] == counts(2, 0, 2)
    assert found["disagreements"] == [expected]


def test_the_optimizer_state_that_differs_is_named():
    run_on_ranks(optimizer_state_differs, 4)


def many_tensors_differ():
    layers = torch.nn.ModuleList([Layer(values(2, 2), values(2)) for _ in range(15)])
    checked = Checked(layers)
    if on_ranks(1):
        for parameter in layers.parameters():
            by_an_ulp(parameter)
    found = checked.check.finish(0)
    assert (found["count"], len(found["disagreements"])) == (30, 20)
    names = [entry["tensor"] for entry in found["disagreements"]]
    assert names == sorted(name for name, _ in layers.named_parameters())[:20]


def test_twenty_tensors_are_listed_and_all_are_counted():
    run_on_ranks(many_tensors_differ, 2)
