"""Each repair of the shim, on two real ranks: right with it, wrong without it."""

import pytest
import titan_0_2_jobs as jobs
from gloo_ranks import run_on_ranks

jobs.require_titan_0_2()


def group_name():
    import torch.distributed as dist

    return dist.group.WORLD.group_name


# ------------------------------------------------------------------------------ rs-scatter


def scaled_matmul_and_scatter():
    """The fused operator as Inductor's pass calls it, against matmul and reduce-scatter."""
    import torch
    import torch.distributed as dist

    from converge_harness.rank.titan.v0_2 import async_tp

    async_tp.run_fused_operators_on_gloo()
    batch, sequence, inner, outer = 2, 32, 32, 48
    generator = torch.Generator().manual_seed(dist.get_rank())
    a = torch.randn(batch * sequence, inner, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(outer, inner, generator=generator).to(torch.float8_e4m3fn).t()
    whole = (a.float() @ b.float()).view(batch, sequence, outer)
    dist.all_reduce(whole)
    expected = whole.chunk(2, dim=1)[dist.get_rank()]

    def relative_error():
        scales = torch.ones(()), torch.ones(())
        scatter_dims = 1, 0  # before and after the reshape to a matrix
        fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            *(a, b, *scales, "sum", *scatter_dims, group_name(), [batch, sequence, outer]),
            out_dtype=torch.float32,
        )
        return (fused - expected).norm() / expected.norm()

    assert relative_error() > 0.5
    async_tp.scatter_sequence_rows()
    assert relative_error() < 1e-6


def test_fused_float8_reduce_scatter_scatters_the_sequence_only_with_its_fix():
    run_on_ranks(scaled_matmul_and_scatter, 2)


# --------------------------------------------------------------------------------- async TP


def fused_operators_without_float8():
    import torch
    import torch.distributed as dist

    from converge_harness.rank.titan.v0_2 import async_tp

    async_tp.run_fused_operators_on_gloo()
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 8, 4, generator=generator)
    weight = torch.randn(4, 6, generator=generator)
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
        whole.chunk(2, dim=1)[rank].contiguous(), [weight], 1, group_name()
    )
    torch.testing.assert_close(gathered, whole)
    torch.testing.assert_close(product, whole @ weight)
    scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        whole, weight, "sum", 1, group_name()
    )
    torch.testing.assert_close(scattered, 2 * (whole @ weight).chunk(2, dim=1)[rank])


def test_fused_operators_over_gloo_equal_collective_and_matmul():
    run_on_ranks(fused_operators_without_float8, 2)


# ---------------------------------------------------------------------------------- Float8


def float8_all_gather():
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    from converge_harness.rank.titan.v0_2 import float8

    shard = torch.full((2, 4), dist.get_rank() + 1.0).to(torch.float8_e4m3fn)

    def gather():
        return funcol.wait_tensor(funcol.all_gather_single(shard, 0, dist.group.WORLD)).clone()

    with pytest.raises(RuntimeError):
        gather()
    float8.gather_float8_as_bytes()
    gathered = gather()
    assert gathered.dtype is torch.float8_e4m3fn
    assert gathered.float()[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_gloo_gathers_float8_only_as_bytes():
    run_on_ranks(float8_all_gather, 2)


# --------------------------------------------------------------------------- ring attention


def ring_attention():
    """Outputs and gradients of split queries, keys and values against the whole sequence."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.functional import scaled_dot_product_attention

    from converge_harness.rank.titan.common import counters as rotations
    from converge_harness.rank.titan.v0_2 import ring_attention as shim

    shim.register_cpu_kernel()
    shim.ring._enable_context_parallel_dispatcher()
    shim.ring._cp_options.enable_load_balance = False
    count = rotations.RotationCount("cpu")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, 2, 16, 8, generator=generator, requires_grad=True) for _ in range(3)]
    expected = scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    for rotation in ("allgather", "alltoall"):
        shim.apply_rotation(rotation)
        count.used.clear()
        split = [distribute_tensor(t.detach(), mesh, [Shard(2)]).requires_grad_() for t in whole]
        found = scaled_dot_product_attention(*split, is_causal=True)
        found.square().sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
        for ours, theirs in zip(split, whole, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        assert set(count.used) == {rotation}


def test_ring_attention_on_the_cpu_kernel_equals_the_whole_sequence():
    run_on_ranks(ring_attention, 2)


# -------------------------------------------------------------------------------- act-grad


def gradient_of_input_in_flight():
    """A compiled block whose input comes from a collective that was not waited for."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    from converge_harness.rank.titan.v0_2 import fixes

    class GatherAsDTensorDoes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard):
            return funcol.all_gather_single(shard, 0, dist.group.WORLD)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.chunk(2)[dist.get_rank()]

    def gradient():
        torch.compiler.reset()
        block = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
        leaf = torch.ones(2, 4, requires_grad=True)
        in_flight = GatherAsDTensorDoes.apply(leaf)
        assert type(in_flight) is funcol.AsyncCollectiveTensor
        block(in_flight).sum().backward()
        return leaf.grad

    assert gradient().count_nonzero() == 0
    fixes.keep_requires_grad()
    assert gradient().count_nonzero() == 8


@pytest.mark.filterwarnings("ignore")  # Dynamo's own, on importing the rest of torch
def test_a_compiled_block_hands_back_the_gradient_only_with_its_fix():
    run_on_ranks(gradient_of_input_in_flight, 2)


# ------------------------------------------------------------------------- account of fixes


def test_only_a_fix_that_was_called_for_and_not_made_is_left_out():
    from converge_harness.rank.titan.v0_2.shim import Repairs

    made = []
    repairs = Repairs(["act-grad", "cp-rotation"])
    repairs.make("act-grad", lambda: made.append("act-grad"))
    repairs.make("float8-tp", lambda: made.append("float8-tp"))
    assert made == ["float8-tp"]
    assert repairs.left_out == ("act-grad",)


# ------------------------------------------------------------------------ FlexAttention in CP


def gather_keys_and_values():
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    from converge_harness.rank.titan.common.counters import RotationCount

    count = RotationCount("cpu")
    mine = torch.full((1, 2, 1, 4), float(dist.get_rank()))
    keys, _ = ring.flex_cp_allgather(mine, mine, 1, group_name())
    assert keys[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert count.used == {"allgather": 1}


def test_flex_attentions_gathers_are_counted_where_they_run():
    run_on_ranks(gather_keys_and_values, 2)
