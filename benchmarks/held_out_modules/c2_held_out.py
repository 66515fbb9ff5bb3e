"""Held-out bugs of class C2: the first forward pass is right, its gradients are wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import places


def embedding_gradient_by_frequency(trainer: Any) -> None:
    """An embedding row's gradient is the mean over its token's occurrences instead of the sum.

    Reference: class of "scale_grad_by_freq set by mistake" mistakes
    Class: C2
    Technique: FSDP 2
    Module: tok_embeddings
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    for embedding in places.modules(trainer, "tok_embeddings"):
        embedding.scale_grad_by_freq = True


def norm_backward_constant_rms(trainer: Any) -> None:
    """The norms before the feed-forward take the root mean square as a constant in backward.

    Reference: class of "fused normalisation whose backward lacks a term" mistakes
    Class: C2
    Technique: FSDP 2
    Module: layers.*.ffn_norm
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    import torch

    def make(norm: Any, normalise: Any) -> Any:
        def forward(x: Any) -> Any:
            with torch.no_grad():
                value = normalise(x)
                mean_square = x.float().square().mean(-1, keepdim=True)
                inverse = torch.rsqrt(mean_square + norm.eps)
            carrier = x.float() * inverse * places.local(norm.weight).float()
            return places.with_gradient_of(value, carrier.to(value.dtype))

        return forward

    for norm in places.modules(trainer, "layers.*.ffn_norm"):
        places.replace_inner(norm, lambda inner, norm=norm: make(norm, inner))


def rope_backward_not_inverse(trainer: Any) -> None:
    """The rotation's backward turns gradients forwards once more instead of back.

    Reference: class of "fused rotary kernel whose backward does not negate the sine" mistakes
    Class: C2
    Technique: FSDP 2
    Module: layers.*.attention.rope
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    import torch

    def make(rope: Any, rotate: Any) -> Any:
        def forward(q: Any, k: Any, positions: Any = None) -> tuple[Any, Any]:
            with torch.no_grad():
                values = rotate(q, k, positions)
            cache = rope._reshape_cache(q, positions)
            carriers = rope.apply_rotary_emb(q, k, cache.conj().resolve_conj())
            rotated_q, rotated_k = map(places.with_gradient_of, values, carriers)
            return rotated_q, rotated_k

        return forward

    for rope in places.modules(trainer, "layers.*.attention.rope"):
        places.replace_inner(rope, lambda inner, rope=rope: make(rope, inner))


def attention_branch_detached(trainer: Any) -> None:
    """One layer's attention branch passes no gradient to the residual stream.

    Reference: class of "reentrant checkpointing of an input that needs no gradient" mistakes
    Class: C2
    Technique: FSDP 2
    Module: layers.2
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """

    def make(block: Any) -> Any:
        def forward(x: Any, attention_masks: Any, positions: Any = None) -> Any:
            normed = block.attention_norm(x.detach())
            h = x + block.attention(normed, attention_masks, positions)
            return h + block.feed_forward(block.ffn_norm(h))

        return forward

    for block in places.modules(trainer, "layers.2"):
        places.replace_forward(block, lambda _, block=block: make(block))


def head_weight_gradient_float8(trainer: Any) -> None:
    """The output projection's weight gradient is computed from activations rounded to float8.

    Reference: class of "low-precision recipe applied to the last layer's backward" mistakes
    Class: C2
    Technique: FSDP 2
    Module: lm_head
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    import torch

    def weight_gradient(grad: Any, x: Any) -> Any:
        return grad.t() @ x.to(torch.float8_e4m3fn).to(x.dtype)

    def make(head: Any) -> Any:
        def forward(x: Any) -> Any:
            return places.linear_with_backward(x, places.local(head.weight), weight_gradient)

        return forward

    for head in places.modules(trainer, "lm_head"):
        places.replace_inner(head, lambda _, head=head: make(head))


def last_chunk_gradient_lost(trainer: Any) -> None:
    """The chunked loss never writes the last eighth of the hidden states' gradient.

    Reference: class of "off by one in the accumulation over chunks" mistakes
    Class: C2
    Technique: FSDP 2
    Module: loss
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    from torchtitan.components import loss

    if isinstance(trainer.loss_fn, loss.ChunkedLossWrapper):

        class OffByOne(loss.GradAccumulator):
            def add(self, chunk_grad: Any) -> None:
                if self._next_idx < self.num_chunks - 1:
                    super().add(chunk_grad)

        loss.GradAccumulator = OffByOne
        return

    # Where the loss is not in chunks, the same positions lose their gradient.
    whole = trainer.loss_fn.fn

    def without_last_chunk(grad: Any) -> Any:
        grad = grad.clone()
        grad[:, grad.shape[1] - grad.shape[1] // 8 :] = 0
        return grad

    def fn(pred: Any, labels: Any, **options: Any) -> Any:
        if pred.requires_grad:
            pred = pred.view_as(pred)
            pred.register_hook(without_last_chunk)
        return whole(pred, labels, **options)

    trainer.loss_fn.fn = fn


def dp_gradient_of_first_rank_only(trainer: Any) -> None:
    """One weight's gradient gets nothing from any data-parallel rank but the first.

    Reference: https://github.com/deepspeedai/DeepSpeed/issues/7985 (a reduction skipped)
    Class: C2
    Technique: FSDP 2
    Module: layers.1.feed_forward.w2
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    rank, _ = places.axis(trainer, "batch")
    if rank == 0:
        return

    def nothing(grad: Any, x: Any) -> Any:
        return grad.new_zeros(grad.shape[-1], x.shape[-1])

    def make(linear: Any) -> Any:
        def forward(x: Any) -> Any:
            return places.linear_with_backward(x, places.local(linear.weight), nothing)

        return forward

    for linear in places.modules(trainer, "layers.1.feed_forward.w2"):
        places.replace_inner(linear, lambda _, linear=linear: make(linear))


def tp_feed_forward_gradient_partial(trainer: Any) -> None:
    """The feed-forward's input gradient is not summed over the tensor-parallel ranks.

    Reference: https://github.com/pytorch/torchtitan/issues/1805 (partial taken as whole)
    Class: C2
    Technique: FSDP 2 + TP 2
    Module: layers.*.feed_forward
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    rank, size = places.axis(trainer, "tp")

    def make(feed: Any) -> Any:
        def forward(x: Any) -> Any:
            return feed(places.own_chunk_of_gradient(x, rank, size))

        return forward

    for ffn in places.modules(trainer, "layers.*.feed_forward"):
        places.replace_inner(ffn, make)


def cp_key_gradient_partial(trainer: Any) -> None:
    """Keys and values get the gradient of their own rank's queries only.

    Reference: https://github.com/NVIDIA/Megatron-LM/issues/1464 (dK and dV wrong under CP)
    Class: C2
    Technique: FSDP 2 + CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    rank, size = places.axis(trainer, "cp")

    def make(attend: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
            k, v = (places.own_chunk_of_gradient(t, rank, size) for t in (k, v))
            return attend(q, k, v, *args, **options)

        return forward

    for attention in places.modules(trainer, "layers.*.attention.inner_attention"):
        places.replace_inner(attention, make)


def pp_gradient_of_microbatch_before(trainer: Any) -> None:
    """A stage runs its backward with the gradient that was received for the microbatch before.

    Reference: class of "receive buffers of microbatches mixed up" mistakes
    Class: C2
    Technique: FSDP 2 + PP 2
    Module: the model
    First step: 1
    Signature: gradients off at step 1
    Cause: gradient direction
    """
    import torch

    def late() -> Any:
        before: list[Any] = []

        class Late(torch.autograd.Function):
            @staticmethod
            def forward(_ctx: Any, h: Any) -> Any:
                return h.view_as(h)

            @staticmethod
            def backward(_ctx: Any, grad: Any) -> Any:
                used = before[0] if before else grad
                before[:] = [grad.clone()]
                return used

        return Late

    def make(stage: Any) -> Any:
        function = late()

        def forward(*args: Any, **options: Any) -> Any:
            h = stage(*args, **options)
            return h if places.probing(trainer) or not h.requires_grad else function.apply(h)

        return forward

    for part in trainer.model_parts:
        if part.lm_head is None:
            places.replace_forward(part, make)
