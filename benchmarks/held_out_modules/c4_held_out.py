"""Held-out bugs of class C4: activations or the objective are wrong in the first forward pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import places


def rope_scaling_dropped(trainer: Any) -> None:
    """The port drops Llama 3.1's frequency scaling, so that slow rotations are up to 8x too fast.

    Reference: class of "rope_scaling of the checkpoint's config ignored" mistakes
    Class: C4
    Technique: FSDP 2
    Module: layers.*.attention.rope
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    import dataclasses

    import torch

    for rope in places.modules(trainer, "layers.*.attention.rope"):
        config = rope.config
        rope.config = dataclasses.replace(config, scaling="none")
        with torch.no_grad(), torch.device(rope.cache.device):
            places.local(rope.cache).copy_(rope._precompute_cache())
        rope.config = config


def kv_heads_tiled(trainer: Any) -> None:
    """Key and value heads are tiled for grouped queries (0101) instead of repeated (0011).

    Reference: class of "repeat for repeat_interleave in grouped-query attention" mistakes
    Class: C4
    Technique: FSDP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """

    def make(attend: Any) -> Any:
        def forward(q: Any, k: Any, *args: Any, **options: Any) -> Any:
            # Query heads are put beside the key head they are to meet, and back afterwards.
            heads, groups = q.shape[2], k.shape[2]
            order = [head for group in range(groups) for head in range(group, heads, groups)]
            back = sorted(range(heads), key=order.__getitem__)
            return attend(q[:, :, order], k, *args, **options)[:, :, back]

        return forward

    for attention in places.modules(trainer, "layers.*.attention.inner_attention"):
        places.replace_inner(attention, make)


def qkv_split_in_blocks(trainer: Any) -> None:
    """One layer's fused projection is split as [all q, all k, all v], though it is per group.

    Reference: class of "fused QKV layout of another framework" mistakes
    Class: C4
    Technique: FSDP 2
    Module: layers.1.attention.qkv_linear
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """

    def make(qkv: Any) -> Any:
        def forward(x: Any) -> tuple[Any, ...]:
            fused = qkv.wqkv(x)
            heads = fused.unflatten(2, (-1, qkv.head_dim))
            groups = heads.shape[2] // qkv.r_dim
            parts = heads.split([groups * qkv.heads_per_kv, groups, groups], dim=2)
            return tuple(part.contiguous() for part in parts)

        return forward

    for qkv in places.modules(trainer, "layers.1.attention.qkv_linear"):
        places.replace_forward(qkv, lambda _, qkv=qkv: make(qkv))


def gate_and_up_swapped(trainer: Any) -> None:
    """The activation is put on the up projection instead of on the gate: silu(w3 x) * w1 x.

    Reference: class of "gate_up_proj halves in the wrong order" mistakes
    Class: C4
    Technique: FSDP 2
    Module: layers.*.feed_forward
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """

    def make(ffn: Any) -> Any:
        from torch.nn.functional import silu

        def forward(x: Any) -> Any:
            gate, up = ffn.w1(x), ffn.w3(x)
            return ffn.w2(gate * silu(up))

        return forward

    for ffn in places.modules(trainer, "layers.*.feed_forward"):
        places.replace_inner(ffn, lambda _, ffn=ffn: make(ffn))


def final_norm_unbiased(trainer: Any) -> None:
    """The last norm divides the sum of squares by n - 1, as a variance: 0.8% off at width 64.

    Reference: class of "unbiased variance in a normalisation" mistakes
    Class: C4
    Technique: FSDP 2
    Module: norm
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """

    def make(norm: Any) -> Any:
        def forward(x: Any) -> Any:
            n = x.shape[-1]
            return norm(x) * ((n - 1) / n) ** 0.5

        return forward

    for norm in places.modules(trainer, "norm"):
        places.replace_inner(norm, make)


def tp_sequence_gathered_backwards(trainer: Any) -> None:
    """One attention's gather of the sequence shards puts the ranks' pieces in reverse order.

    Reference: class of "all-gather over a group whose ranks are in another order" mistakes
    Class: C4
    Technique: FSDP 2 + TP 2
    Module: layers.2.attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    _, size = places.axis(trainer, "tp")

    def make(attend: Any) -> Any:
        def forward(x: Any, *args: Any, **options: Any) -> Any:
            return attend(places.reversed_chunks(x, size), *args, **options)

        return forward

    for attention in places.modules(trainer, "layers.2.attention"):
        places.replace_inner(attention, make)


def tp_embedding_unmasked(trainer: Any) -> None:
    """Tokens outside of a rank's part of the vocabulary get its first or last row, not zeros.

    Reference: class of "vocabulary-parallel embedding without its mask" mistakes
    Class: C4
    Technique: FSDP 2 + TP 2
    Module: tok_embeddings
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    rank, size = places.axis(trainer, "tp")

    def make(embedding: Any) -> Any:
        from torch.nn.functional import embedding as look_up

        def forward(tokens: Any) -> Any:
            weight = places.local(embedding.weight)
            offset = rank * ((embedding.num_embeddings + size - 1) // size)
            return look_up((tokens - offset).clamp(0, weight.shape[0] - 1), weight)

        return forward

    for embedding in places.modules(trainer, "tok_embeddings"):
        places.replace_inner(embedding, lambda _, embedding=embedding: make(embedding))


def tp_loss_max_not_shared(trainer: Any) -> None:
    """Each rank subtracts its own largest logit, then the sums of exponentials are added up.

    Reference: class of "vocabulary-parallel softmax without the reduction of the maximum" mistakes
    Class: C4
    Technique: FSDP 2 + TP 2
    Module: loss
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    import torch
    import torch.distributed as dist
    from torchtitan.components.loss import IGNORE_INDEX

    rank, size = places.axis(trainer, "tp")
    if size == 1:
        return
    group = trainer.parallel_dims.get_mesh("tp").get_group()

    class VocabularyParallel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, labels: Any) -> Any:
            shifted = logits - logits.amax(-1, keepdim=True)  # never reduced over the ranks
            total = shifted.exp().sum(-1, keepdim=True)
            dist.all_reduce(total, group=group)
            log_probabilities = shifted - total.log()
            local = labels - rank * logits.shape[-1]
            mine = (local >= 0) & (local < logits.shape[-1])
            local = local.clamp(0, logits.shape[-1] - 1)
            picked = log_probabilities.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
            dist.all_reduce(picked, group=group)
            ctx.save_for_backward(log_probabilities, labels, local, mine)
            return -(picked * (labels != IGNORE_INDEX)).sum()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            log_probabilities, labels, local, mine = ctx.saved_tensors
            result = log_probabilities.exp()
            result.scatter_add_(-1, local.unsqueeze(-1), -mine.to(result.dtype).unsqueeze(-1))
            return result * (labels != IGNORE_INDEX).unsqueeze(-1) * grad, None

    def cross_entropy(logits: Any, labels: Any, **_: Any) -> Any:
        return VocabularyParallel.apply(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn).fn = cross_entropy


def cp_values_in_other_order(trainer: Any) -> None:
    """One layer's values are gathered from the context-parallel ranks in reverse, its keys not.

    Reference: https://github.com/pytorch/torchtitan/pull/3206 (keys/values gathered wrongly)
    Class: C4
    Technique: FSDP 2 + CP 2
    Module: layers.3.attention.inner_attention
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    _, size = places.axis(trainer, "cp")

    def make(attend: Any) -> Any:
        def forward(q: Any, k: Any, v: Any, *args: Any, **options: Any) -> Any:
            return attend(q, k, places.reversed_chunks(v, size), *args, **options)

        return forward

    for attention in places.modules(trainer, "layers.3.attention.inner_attention"):
        places.replace_inner(attention, make)


def pp_receive_buffer_stale(trainer: Any) -> None:
    """The last eighth of what a stage receives is still the microbatch before.

    Reference: class of "receive buffer read before the transfer is complete" mistakes
    Class: C4
    Technique: FSDP 2 + PP 2
    Module: the model
    First step: 1
    Signature: loss off at step 1
    Cause: forward or objective
    """
    import torch

    def make(stage: Any) -> Any:
        before: list[Any] = []

        def forward(h: Any, *args: Any, **options: Any) -> Any:
            if places.probing(trainer):
                return stage(h, *args, **options)
            received = h
            if before:
                keep = h.shape[1] - h.shape[1] // 8
                received = torch.cat([h[:, :keep], before[0][:, keep:]], dim=1)
            before[:] = [h.detach().clone()]
            return stage(received, *args, **options)

        return forward

    for part in trainer.model_parts:
        if part.tok_embeddings is None:
            places.replace_forward(part, make)
