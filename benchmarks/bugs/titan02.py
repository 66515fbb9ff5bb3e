"""Bugs of techniques that run on the CPU in torchtitan 0.2.2 only.

Ring attention with its rotations, head-tail balancing, async tensor parallelism and real Float8
all-gathers; the code that is broken is torch's and torchao's own.
"""

from __future__ import annotations

from typing import Any


def ring_drops_remote_gradients(trainer: Any) -> None:
    """Keys and values of other ranks get no gradient from this rank's queries.

    The ring's backward has one call of the attention kernel per chunk, the first for its own.

    Reference: Megatron-LM issue 1464
    Class: C2
    Technique: CP 2, ring attention
    First step: 1
    Signature: loss right, gradients of attention and of all below it wrong in direction
    Cause: gradient direction
    """
    ring = _ring()
    backward = ring._templated_ring_attention_backward

    def dropping(group: Any, seq_dim: int, op: Any, *args: Any, **kwargs: Any) -> Any:
        calls = 0

        def first_only(**operands: Any) -> Any:
            nonlocal calls
            calls += 1
            query, key, value, *rest = op(**operands)
            if calls > 1:
                key, value = key * 0, value * 0
            return query, key, value, *rest

        return backward(group, seq_dim, first_only, *args, **kwargs)

    ring._templated_ring_attention_backward = dropping


def ring_logsumexp_of_first_chunk(trainer: Any) -> None:
    """The logsumexp saved for backward is that of the rank's own chunk, not of the whole row.

    The output is merged right, so only the backward, which recomputes the probabilities from it,
    sees rows that sum to more than one.

    Reference: class of Megatron-LM issue 1464
    Class: C2
    Technique: CP 2, ring attention
    First step: 1
    Signature: loss right, gradients of attention and of all below it wrong in direction
    Cause: gradient direction
    """
    merger = _ring()._SDPAMerger
    merge = merger._merge_one

    def keeping_first(self: Any, block_out: Any, block_lse: Any, partial: bool) -> None:  # noqa: FBT001
        before = self._lse
        merge(self, block_out, block_lse, partial)
        if before is not None:
            self._lse = before

    merger._merge_one = keeping_first


def ring_merge_weights_swapped(trainer: Any) -> None:
    """The outputs of two chunks are merged with each other's softmax weights.

    Reference: class of Megatron-LM issue 1464
    Class: C4
    Technique: CP 2, ring attention
    First step: 1
    Signature: the loss of the first step differs
    Cause: forward or objective
    """
    merger = _ring()._SDPAMerger
    merge = merger._merge_one

    def swapped(self: Any, block_out: Any, block_lse: Any, partial: bool) -> None:  # noqa: FBT001
        if self._out is None:
            merge(self, block_out, block_lse, partial)
            return
        half = slice(self._out.shape[2] // 2 if partial else 0, None)
        mine, other = self._out[:, :, half].clone(), block_out
        merge(self, other, block_lse, partial)
        merged = self._out[:, :, half]
        self._out[:, :, half] = mine + other - merged

    merger._merge_one = swapped


def ring_turns_backwards(trainer: Any) -> None:
    """Keys and values go round the ring the other way; each rank takes them for its neighbour's.

    Reference: class of torchtitan issue 3206
    Class: C4
    Technique: CP 4, ring attention by all-to-all
    First step: 1
    Needs: CP > 2, for a ring of two has one direction
    Signature: the loss of the first step differs
    Cause: forward or objective
    """
    import torch.distributed as dist

    ring = _ring()

    def exchange(self: Any, buffer: Any) -> None:
        size = dist.get_world_size(self._pg)
        targets = [size - 1, *range(size - 1)]
        self._buffer = ring.ft_c.permute_tensor(buffer.contiguous(), targets, self._pg)

    ring._AllToAllRotater.exchange_buffers = exchange


def head_tail_mask_forgotten(trainer: Any) -> None:
    """Attention masks the chunks as if they lay in order; they are dealt out head and tail.

    torch keeps in a global variable whether sequences are balanced; whoever sets it last wins.

    Reference: class of torchtitan issue 3206
    Class: C4
    Technique: CP 2, head-tail balancing
    First step: 1
    Signature: the loss of the first step differs
    Cause: forward or objective
    """
    ring = _ring()
    forward, backward = (
        ring._templated_ring_attention,
        ring._templated_ring_attention_backward,
    )

    def unbalanced(template: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            ring._cp_options.enable_load_balance = False
            return template(*args, **kwargs)

        return called

    ring._templated_ring_attention = unbalanced(forward)
    ring._templated_ring_attention_backward = unbalanced(backward)


def head_tail_positions_in_order(trainer: Any) -> None:
    """Rotary positions are split in order, tokens head and tail.

    Reference: class of torchtitan issue 3604
    Class: C4
    Technique: CP 2, head-tail balancing
    First step: 1
    Signature: the loss of the first step differs
    Cause: forward or objective
    """
    import torch
    from torchtitan import train

    prepare = train.prepare_context_parallel_input

    def with_positions_in_order(*args: Any, **kwargs: Any) -> Any:
        inputs, labels, more = prepare(*args, **kwargs)
        length = inputs.shape[1]
        first = length * trainer.parallel_dims.get_mesh("cp").get_local_rank()
        positions = torch.arange(first, first + length, dtype=torch.int32, device=inputs.device)
        return inputs, labels, {**more, "positions": positions.expand(inputs.shape)}

    train.prepare_context_parallel_input = with_positions_in_order


def async_tp_chunks_swapped(trainer: Any) -> None:
    """The fused all-gather and matmul files each rank's chunk under its neighbour's place.

    Reference: class of torchtitan issue 3206
    Class: C4
    Technique: TP 2, compile, async TP
    First step: 1
    Signature: the loss of the first step differs
    Cause: forward or objective
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    gather = symmetric_memory._pipelined_multi_all_gather_and_consume

    def swapped(shard: Any, consume: Any, *args: Any, **kwargs: Any) -> None:
        size = trainer.parallel_dims.tp
        gather(shard, lambda parts, rank: consume(parts, (rank + 1) % size), *args, **kwargs)

    symmetric_memory._pipelined_multi_all_gather_and_consume = swapped


def float8_scale_of_own_shard(trainer: Any) -> None:
    """Each rank casts its shard of a weight by its own largest entry, and reads all by its own.

    The scale has to be that of the whole weight: a gathered chunk does not bring its own.

    Reference: class of torchao issue 4300
    Class: C4
    Technique: FSDP 2, Float8 all-gather
    First step: 1
    Needs: enable_fsdp_float8_all_gather
    Signature: the loss of the first step differs
    Cause: forward or objective
    """
    from torchao.float8 import fsdp_utils

    cast = fsdp_utils.hp_tensor_to_float8_dynamic

    def by_own_shard(*args: Any, **kwargs: Any) -> Any:
        return cast(*args, **{**kwargs, "reduce_amax": False})

    fsdp_utils.hp_tensor_to_float8_dynamic = by_own_shard


def _ring() -> Any:
    """Ring attention of torch."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention
