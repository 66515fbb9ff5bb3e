"""Held out, C2: the forward pass is right, gradients point elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from places import before_clipping, local, parameters


def accumulated_gradient_overwritten(trainer: Any) -> None:
    """The weight gradient of every w2 is written over by the next microbatch, not added to.

    A fused kernel that writes into the gradient buffer with beta = 0.

    Reference: Primus pull 1046, Megatron-LM pull 6279
    Class: C2
    Technique: FSDP 2, 2 accumulation steps
    Module: none
    First step: 1
    Signature: gradients of feed_forward.w2 of all layers are those of the last microbatch only
    Cause: gradient direction
    Says: w2
    """
    forward_backward = trainer.forward_backward_step

    def overwriting(**options: Any) -> Any:
        for _, parameter in parameters(trainer, "feed_forward.w2"):
            parameter.grad = None
        return forward_backward(**options)

    trainer.forward_backward_step = overwriting


def query_groups_not_summed(trainer: Any) -> None:
    """The attention kernel's backward takes the first query head of a group for the whole group.

    Gradients of keys and values have to be summed over the query heads that share them.

    Reference: levanter pull 449, native-sparse-attention-triton issue 27
    Class: C2
    Technique: DDP 2, grouped-query attention
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: gradients of wqkv differ in every layer (keys and values), and all below layer 3
    Cause: gradient direction
    """
    for layer in trainer.model_parts[0].layers.values():
        _first_query_head_only(layer.attention.inner_attention)


def norm_backward_without_projection(trainer: Any) -> None:
    """The fused RMSNorm of layer 2 takes its scale for a constant in the backward pass.

    The input's gradient lacks the term that comes from the mean of squares.

    Reference: class of Megatron-LM issue 1464 (right forward, wrong backward kernel)
    Class: C2
    Technique: FSDP 2, fused norm in one layer
    Module: layers.2.ffn_norm
    First step: 1
    Signature: layer 3, the output and layer 2's own norm weights are right, what lies below differs
    Cause: gradient direction
    Says: layers.2 | layers.1 | layer 2 | layer 1
    """
    layer = trainer.model_parts[0].layers["2"]
    for norm in (layer.attention_norm, layer.ffn_norm):
        _constant_scale(norm)


def last_chunk_without_gradient(trainer: Any) -> None:
    """The chunked loss never writes the last chunk's gradient of the hidden states.

    An end index off by one: the buffer stays zero for the last eighth of every sequence.

    Reference: class of torchtitan issue 3412
    Class: C2
    Technique: FSDP 2, chunked loss
    Module: loss or the model
    First step: 1
    Signature: the gradient of lm_head is right, every other one differs
    Cause: gradient direction
    """
    from torchtitan.components.loss import GradAccumulator

    add = GradAccumulator.add

    def adding(self: Any, gradient: torch.Tensor) -> None:
        if self._next_idx == self.num_chunks - 1:
            gradient = torch.zeros_like(gradient)
        add(self, gradient)

    GradAccumulator.add = adding


def stale_layer(trainer: Any) -> None:
    """From step 2 on the optimizer takes layer 1's gradients of the step before.

    The reduction overlaps with the optimizer, which does not wait for this bucket.

    Reference: gpt-neox issue 1004, fairscale issue 780
    Class: C2
    Technique: FSDP 2, overlapped reduction
    Module: none
    First step: 2
    Signature: gradients of layers.1 differ from step 2 on, all others are right at step 2
    Cause: gradient direction
    Says: layers.1 | layer 1
    """
    buffers: dict[str, torch.Tensor] = {}

    def take_last() -> None:
        for name, parameter in parameters(trainer, "layers.1."):
            gradient = local(parameter.grad)
            fresh = gradient.clone()
            if name in buffers:
                gradient.copy_(buffers[name])
            buffers[name] = fresh

    before_clipping(take_last)


def _first_query_head_only(attention: Any) -> None:
    forward = attention.forward

    def repeat(heads: torch.Tensor, times: int) -> torch.Tensor:
        return torch.stack([heads] + [heads.detach()] * (times - 1), dim=3).flatten(2, 3)

    def attend(q: Any, k: Any, v: Any, *, enable_gqa: bool = False, **options: Any) -> Any:
        times = q.shape[2] // k.shape[2]
        return forward(q, repeat(k, times), repeat(v, times), enable_gqa=False, **options)

    attention.forward = attend


def _constant_scale(norm: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        return x * scale.detach() * norm.weight

    norm.forward = forward
