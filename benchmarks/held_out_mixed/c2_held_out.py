"""Held out in bf16 mixed, C2: the forward pass is right and gradients have a wrong direction."""

from __future__ import annotations

from typing import Any

import torch
from hooks import before_reduction, count_microbatches, modules, replace_forward
from places import before_clipping, coordinate, local, parameters, rank
from torch.nn import functional


def first_microbatch_of_rank_lost(trainer: Any) -> None:
    """Rank 1 hands zeros to the reduction of the first of its two accumulation microbatches.

    Reference: class of deepspeedai/DeepSpeed#7985 (a microbatch is not reduced in bf16)
    Class: C2
    Technique: FSDP 2, gradient accumulation 2
    Module: none
    First step: 1
    Signature: a quarter of the tokens has no part in the gradients; the loss is right
    Cause: gradient direction
    """
    count = count_microbatches(trainer)

    def lose(gradients: list[Any]) -> None:
        if rank() == 1 and count["now"] == 0:
            gradients[:] = [torch.zeros_like(gradient) for gradient in gradients]

    before_reduction(lose)


def reduction_in_float8(trainer: Any) -> None:
    """Gradients go through float8 (e5m2, a scale per tensor) before they are reduced.

    Reference: class of compressed gradient communication without error feedback
    Class: C2
    Technique: HSDP 2 x 2
    Module: none
    First step: 1
    Signature: gradients have noise of some percent in all parameters; norms nearly right
    Cause: gradient direction
    """

    def compress(gradient: Any) -> Any:
        plain = local(gradient)
        scale = plain.abs().amax().float().clamp(min=1e-30) / 57344
        return (plain.float() / scale).to(torch.float8_e5m2).float().mul(scale).to(plain.dtype)

    def compress_all(gradients: list[Any]) -> None:
        gradients[:] = [compress(gradient) for gradient in gradients]

    before_reduction(compress_all)


def norm_backward_without_projection(trainer: Any) -> None:
    """The backward of all RMSNorms takes the inverse root mean square for a constant.

    The input's gradient lacks the term that projects on the normalised input.

    Reference: class of hand-written norm kernels (Liger-Kernel, apex) with a lost dx term
    Class: C2
    Technique: FSDP 2, TP 2
    Module: norm
    First step: 1
    Signature: gradients of all before the last norm are off; the loss is right
    Cause: gradient direction
    """
    rms_norm = functional.rms_norm

    def normed(x: Any, shape: Any, weight: Any = None, eps: float = 1e-5) -> Any:
        right = rms_norm(x, shape, weight, eps)
        scale = (x.detach().float().square().mean(-1, keepdim=True) + eps).rsqrt()
        wrong = (x.float() * scale).to(x.dtype) * weight
        return wrong + (right - wrong).detach()

    functional.rms_norm = normed


def gathered_keys_keep_own_gradient(trainer: Any) -> None:
    """The backward of CP's gather of keys and values does not add what other ranks computed.

    Each rank takes the slice of its own gradient; its queries' part alone.

    Reference: class of NVIDIA/Megatron-LM#1464 (dK and dV of context parallel attention wrong)
    Class: C2
    Technique: FSDP 2, CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: gradients of wqkv and of all before it are off; the loss is right
    Cause: gradient direction
    """
    from torchtitan.protocols import module

    redistribute = module.spmd_redistribute_per_axis
    place = coordinate(trainer, "cp")

    def changed(x: Any, mesh: Any, source: Any, target: Any) -> Any:
        whole = redistribute(x, mesh, source, target)
        length = x.shape[1]
        if x.ndim == 4 and whole.shape[1] > length and whole.requires_grad:
            own = torch.zeros(1, whole.shape[1], 1, 1, dtype=torch.bool, device=x.device)
            own[:, place * length : (place + 1) * length] = True
            whole.register_hook(lambda gradient: gradient * own)
        return whole

    module.spmd_redistribute_per_axis = changed


def embedding_gradient_one_step_old(trainer: Any) -> None:
    """From the second step on, the embedding's gradient is the one of the step before.

    Its reduction overlaps with the step and is not waited for.

    Reference: class of overlapped reductions without a wait (stale gradients)
    Class: C2
    Technique: FSDP 2, PP 2, Interleaved1F1B
    Module: none
    First step: 2
    Signature: the gradient of tok_embeddings.weight has the size of a right one, not its direction
    Cause: gradient direction
    """
    kept: dict[tuple[str, int], Any] = {}

    def exchange() -> None:
        for name, parameter in parameters(trainer, "tok_embeddings"):
            gradient = local(parameter.grad)
            kept[name, trainer.step] = gradient.clone()
            if trainer.step > 1:
                gradient.copy_(kept.pop((name, trainer.step - 1)))

    before_clipping(exchange)


def grouped_keys_take_one_query(trainer: Any) -> None:
    """The backward of grouped-query attention gives keys and values the first query head's part.

    The parts of the other query heads of a group are not added.

    Reference: class of attention kernels whose dK and dV are overwritten, not summed, per group
    Class: C2
    Technique: DDP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: gradients of the key and value rows of wqkv are too small and turned; loss is right
    Cause: gradient direction
    """

    def make(forward: Any) -> Any:
        def repeat(heads: Any, group: int) -> Any:
            copies = [heads] + [heads.detach()] * (group - 1)
            return torch.stack(copies, dim=3).flatten(2, 3)

        def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
            group = q.shape[2] // k.shape[2]
            return forward(q, repeat(k, group), repeat(v, group), **options)

        return attend

    for module in modules(trainer, "inner_attention"):
        replace_forward(module, make)
