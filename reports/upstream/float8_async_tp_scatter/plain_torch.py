"""The fused Float8 matmul and reduce-scatter scatters rows of the batch instead of the sequence.

With torch alone, on two CPU processes: ``python plain_torch.py``. Exit code 1 if the result is
wrong. Async tensor parallelism (``torch._inductor.config._micro_pipeline_tp``) replaces a Float8
matmul that is followed by a reduce-scatter over the sequence by
``symm_mem.fused_scaled_matmul_reduce_scatter``. Its pass (``_inductor/fx_passes/
micro_pipeline_tp.py``) hands over the operand flattened from (batch, sequence, hidden) to
(batch * sequence, hidden), with scatter dimension 0 "after the reshape". The implementation cuts
that matrix into one block of rows per rank. For a batch of one sample these are rows of the
sequence, for more they are whole samples.
"""

import os
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.multiprocessing as mp

RANKS = 2
SEQUENCE, HIDDEN, OUT = 32, 32, 48


def produce_and_all_to_all(
    produce: Callable[[int, torch.Tensor], None],
    output: torch.Tensor,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    """``_pipelined_produce_and_all2all`` without symmetric memory, which CPUs do not have."""
    chunks = output.chunk(RANKS, dim=out_chunk_dim)
    sent = torch.empty((RANKS, *chunks[0].shape), dtype=output.dtype)
    for rank in range(RANKS):
        produce(rank, sent[rank])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    for chunk, part in zip(chunks, received, strict=True):
        chunk.copy_(part)


def relative_error(batch: int) -> float:
    """Of the fused operator's result, on this rank, for a batch of so many samples."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(batch * SEQUENCE, HIDDEN, generator=generator).to(torch.float8_e4m3fn)
    b = torch.randn(OUT, HIDDEN, generator=generator).to(torch.float8_e4m3fn).t()
    whole = (a.float() @ b.float()).view(batch, SEQUENCE, OUT)
    dist.all_reduce(whole)
    expected = whole.chunk(RANKS, dim=1)[rank]
    fused = symm_mem._fused_scaled_matmul_reduce_scatter_impl(
        mm_out_op=torch.ops.aten._scaled_mm.out,
        A=a,
        B=b,
        A_scale=torch.ones(()),
        kwargs={"scale_b": torch.ones(()), "out_dtype": torch.float32},
        out_dtype=torch.float32,
        reduce_op="sum",
        orig_scatter_dim=1,  # the sequence, of (batch, sequence, hidden)
        scatter_dim_after_maybe_reshape=0,  # as the pass says it
        group_name=dist.group.WORLD.group_name,
        output_shape=[batch, SEQUENCE, OUT],
    )
    return float((fused - expected).norm() / expected.norm())


def run(rank: int, store: str, errors: torch.Tensor) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    symm_mem._pipelined_produce_and_all2all = produce_and_all_to_all
    for number, batch in enumerate((1, 2)):
        errors[number, rank] = relative_error(batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    found = torch.zeros(2, RANKS).share_memory_()
    with TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.join(folder, "store"), found), nprocs=RANKS)
    one, two = found.amax(dim=1).tolist()
    print(
        f"torch {torch.__version__}: relative error {one:.2g} with one sample, {two:.2g} with two"
    )
    sys.exit(int(max(one, two) > 1e-5))
