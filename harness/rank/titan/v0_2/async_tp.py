"""Async tensor parallelism over gloo: the real graph rewrite and the real chunked matmuls.

Inductor's pass rewrites all-gather + matmul and matmul + reduce-scatter into fused operators, and
torch's own implementations of those cut the matmuls into chunks. Only the two loops that copy
chunks between GPUs over NVLink are replaced, by gloo collectives.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


@functools.cache
def run_fused_operators_on_gloo() -> None:
    """Register torch's CUDA implementations of the fused operators for the CPU.

    They are written in terms of matmuls and two pipelined exchanges; only the exchanges need
    symmetric memory on a GPU, and those are replaced.
    """
    symmetric_memory._pipelined_multi_all_gather_and_consume = _all_gather_and_consume
    symmetric_memory._pipelined_produce_and_all2all = _produce_and_all_to_all
    symmetric_memory._should_use_multimem_all_gather_matmul = lambda *_: False
    for operator in (
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    ):
        symmetric_memory.lib.impl(operator, getattr(symmetric_memory, f"_{operator}"), "CPU")


def _all_gather_and_consume(
    shard: list[Any],
    shard_consumer: Callable[[list[Any], int], None],
    ag_out: list[Any],
    group_name: str,
    ag_out_needed: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
) -> None:
    """Gather while consuming: the own chunk at once, the others in torch's order of ranks."""
    del ag_out_needed
    group = _resolve_process_group(group_name)
    size, rank = group.size(), group.rank()
    pending = [
        dist.all_gather_single(
            # gloo has no Float8 element type: all travels as bytes
            gathered.view(torch.uint8),
            part.view(torch.uint8),
            group=group,
            async_op=True,
        )
        for part, gathered in zip(shard, ag_out, strict=True)
    ]
    shard_consumer(shard, rank)
    for work in pending:
        work.wait()
    chunks = [gathered.chunk(size) for gathered in ag_out]
    for step in range(1, size):
        source = (rank + step) % size
        shard_consumer([chunk[source] for chunk in chunks], source)


def _produce_and_all_to_all(
    chunk_producer: Callable[[int, Any], None],
    output: Any,
    group_name: str,
    out_chunk_dim: int = 0,
) -> None:
    """Compute every rank's chunk, the own one last as torch does, then exchange them."""
    group = _resolve_process_group(group_name)
    size, rank = group.size(), group.rank()
    chunks = output.chunk(size, dim=out_chunk_dim)
    sent = torch.empty((size, *chunks[0].shape), dtype=output.dtype)
    for step in range(1, size + 1):
        target = (rank + step) % size
        chunk_producer(target, sent[target])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    for chunk, part in zip(chunks, received, strict=True):
        chunk.copy_(part)


def scatter_sequence_rows() -> None:
    """Fix ``rs-scatter``: give the fused Float8 reduce-scatter its operand in three dimensions.

    Inductor's pass hands over A flattened to (batch x sequence, hidden) with the scatter dimension
    "after the reshape" 0, which stands for the batch: ``_fused_scaled_matmul_reduce_scatter_impl``
    then scatters rows of the batch where the graph asked for rows of the sequence. Right only for
    one sample per batch; relative error 1.2 otherwise (torch 2.13). The implementation itself
    handles a three-dimensional A, so A and its rowwise scales are given their shape back.
    """
    implementation = symmetric_memory._fused_scaled_matmul_reduce_scatter_impl

    def with_unflattened_operand(
        *,
        A: Any,  # noqa: N803 - torch's own names
        A_scale: Any,  # noqa: N803
        orig_scatter_dim: int,
        scatter_dim_after_maybe_reshape: int,
        output_shape: list[int],
        **others: Any,
    ) -> Any:
        if A.dim() == 2 and len(output_shape) > 2:  # noqa: PLR2004 - a matrix, and more
            A = A.view(*output_shape[:-1], A.shape[-1])  # noqa: N806
            if A_scale.numel() > 1:
                A_scale = A_scale.view(*output_shape[:-1], 1)  # noqa: N806
            scatter_dim_after_maybe_reshape = orig_scatter_dim
        return implementation(
            A=A,
            A_scale=A_scale,
            orig_scatter_dim=orig_scatter_dim,
            scatter_dim_after_maybe_reshape=scatter_dim_after_maybe_reshape,
            output_shape=list(output_shape),
            **others,
        )

    symmetric_memory._fused_scaled_matmul_reduce_scatter_impl = with_unflattened_operand


def enable_symmetric_memory(parallelize: Callable[..., Any]) -> None:
    """Fix ``symm-mem``: enable symmetric memory for the TP group when async TP is switched on.

    Inductor's pass skips groups for which ``enable_symm_mem_for_group`` was never called.
    torchtitan stopped calling it when torch deprecated it, but the pass of torch 2.13 still asks
    (pytorch#193027, torchtitan#4045). ``parallelize`` is the model's parallelize function, whose
    module holds ``maybe_enable_async_tp``.
    """
    module: Any = inspect.getmodule(parallelize)
    maybe_enable = module.maybe_enable_async_tp

    def enable_with_symmetric_memory(job_config: Any, tp_mesh: Any) -> None:
        maybe_enable(job_config, tp_mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that it is not needed: it is
            symmetric_memory.enable_symm_mem_for_group(tp_mesh.get_group().group_name)

    module.maybe_enable_async_tp = enable_with_symmetric_memory
