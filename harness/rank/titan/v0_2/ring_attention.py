"""Context parallel on the CPU: torch's ring attention over the CPU's flash attention kernel.

Everything that makes context parallel hard stays torch's own: the ring templates, head-tail
balancing, the merge of partial softmaxes, both rotations. Only registrations are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as ring
from torch.distributed.tensor import DTensor, Shard

_SEQUENCE_DIM = 2
"""Of queries, keys and values, which are (batch, head, sequence, head dim)."""


@functools.cache
def register_cpu_kernel() -> None:
    """Let DTensor send the CPU's flash attention, forward and backward, through the ring.

    torch registers its CUDA kernels only (``_sdpa_handler`` in ``_context_parallel``); the CPU
    kernel has other arguments, but the same meaning: output and logsumexp.
    """
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import (
        expand_to_full_mesh_op_strategy,
        register_op_strategy,
    )

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def sharded_heads(outputs: int, inputs: int) -> Callable[[Any], Any]:
        # The one placement that context parallel uses: all operands split by sequence.
        def strategy(schema: Any) -> Any:
            return expand_to_full_mesh_op_strategy(
                schema.get_mesh_from_args(validate=False),
                schema,
                [[Shard(_SEQUENCE_DIM)] * (outputs + inputs)],
                input_index=outputs,
            )

        return strategy

    # The schema info names the first argument that is no tensor: it is part of the cache key.
    register_op_strategy(forward, schema_info=RuntimeSchemaInfo(3))(sharded_heads(2, 3))
    register_op_strategy(backward, schema_info=RuntimeSchemaInfo(6))(sharded_heads(3, 6))
    ring.custom_ops[forward] = functools.partial(_dispatch, _ring_forward)
    ring.custom_ops[backward] = functools.partial(_dispatch, _ring_backward)


def _dispatch(local_op: Callable[..., Any], op: Any, args: Any, kwargs: Any) -> Any:
    """What torch's ``_sdpa_handler`` does, for a kernel that its table does not know."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    if info.output_sharding.needs_redistribute:
        raise RuntimeError("ring attention needs queries, keys and values split by sequence")
    results = local_op(info.compute_mesh, *info.local_args, **info.local_kwargs)
    return dispatcher.wrap(results, info.output_sharding.output_spec)


def _ring_forward(
    mesh: Any,
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the kernel's own signature
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    _refuse_mask(attn_mask)
    return ring._templated_ring_attention(
        mesh.get_group(),
        _SEQUENCE_DIM,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        query=query,
        key=key,
        value=value,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )


def _ring_backward(  # noqa: PLR0917 - the kernel's own signature
    mesh: Any,
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    _refuse_mask(attn_mask)
    return ring._templated_ring_attention_backward(
        mesh.get_group(),
        _SEQUENCE_DIM,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad_out=grad_out,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )


def _refuse_mask(attn_mask: Any) -> None:
    if attn_mask is not None:
        raise NotImplementedError("ring attention on the CPU knows causal masking only")


def apply_rotation(method: str) -> None:
    """Fix ``cp-rotation``: hand the configured rotation to torch, which torchtitan forgets.

    ``method`` is ``allgather`` or ``alltoall`` (``parallelism.context_parallel_rotate_method``).
    torchtitan 0.2.2 still has a helper that does this, ``create_context_parallel_ctx`` in
    ``distributed/utils.py``, and calls it nowhere.
    """
    ring.set_rotate_method(method)
