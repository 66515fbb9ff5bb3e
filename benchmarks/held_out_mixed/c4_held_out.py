"""Held out in bf16 mixed, C4: the forward pass or the objective is another one."""

from __future__ import annotations

import math
from typing import Any

import torch
from hooks import modules, replace_forward
from torch.nn import functional


def output_projection_in_float8(trainer: Any) -> None:
    """``lm_head``, which must stay in bf16, multiplies in float8 (e4m3, a scale per tensor).

    The list of modules that float8 leaves out is matched against wrong names.

    Reference: class of pytorch/torchtitan's and torchao's float8 ``filter_fqns``
    Class: C4
    Technique: FSDP 2
    Module: lm_head
    First step: 1
    Signature: the loss is a little off from step 1; gradients have noise of some percent
    Cause: forward or objective
    """

    def quantize(x: Any) -> Any:
        scale = x.detach().abs().amax().float().clamp(min=1e-30) / 448
        rounded = (x.detach().float() / scale).to(torch.float8_e4m3fn).float().mul(scale)
        return x + (rounded.to(x.dtype) - x.detach())

    for head in modules(trainer, "lm_head"):
        replace_forward(
            head,
            lambda _, head=head: lambda x: functional.linear(quantize(x), quantize(head.weight)),
        )


def norm_divides_by_one_less(trainer: Any) -> None:
    """All RMSNorms divide the sum of squares by the dimension less one, as a variance does.

    Reference: class of hand-written norm kernels (``torch.var`` without ``unbiased=False``)
    Class: C4
    Technique: DDP 2
    Module: layers.*.attention_norm
    First step: 1
    Signature: the loss is off by .1% from step 1; outputs of norms are 0.8% too small
    Cause: forward or objective
    """
    rms_norm = functional.rms_norm

    def normed(x: Any, shape: Any, weight: Any = None, eps: float = 1e-5) -> Any:
        factor = math.sqrt((x.shape[-1] - 1) / x.shape[-1])
        return (rms_norm(x.float(), shape, weight.float(), eps) * factor).to(x.dtype)

    functional.rms_norm = normed


def documents_begin_one_late(trainer: Any) -> None:
    """The mask of packed documents lets each document begin one token late.

    The first token of a document sees the document before it, and its own document not it.

    Reference: class of off-by-one in the cumulative lengths of packed sequences
    Class: C4
    Technique: FSDP 2, CP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Signature: the loss is off from step 1, above all just after a document's beginning
    Cause: forward or objective
    """
    model = trainer.model_parts[0]
    get_masks = model.get_attention_masks

    def masks(positions: Any) -> Any:
        begins = positions == 0
        late = begins.roll(1, dims=1)
        late[:, 0] = True
        late[:, 1] = begins[:, 1]
        return get_masks(positions=torch.where(late, 0, 1))

    model.get_attention_masks = masks


def last_token_of_chunk_ignored(trainer: Any) -> None:
    """The chunked loss drops the last token of each chunk, as if labels were shifted in it.

    The sum is divided by all tokens nonetheless.

    Reference: class of chunked or fused linear cross-entropy that shifts labels per chunk
    Class: C4
    Technique: FSDP 2, TP 2
    Module: loss
    First step: 1
    Signature: the loss is 1/32 too small from step 1, and gradients lack those tokens
    Cause: forward or objective
    """
    loss_of_chunk = trainer.loss_fn.loss_fn

    def shifted(logits: Any, labels: Any, *arguments: Any, **options: Any) -> Any:
        labels = labels.clone()
        labels[:, -1] = -100
        return loss_of_chunk(logits, labels, *arguments, **options)

    trainer.loss_fn.loss_fn = shifted


def stage_reuses_first_microbatch_masks(trainer: Any) -> None:
    """The second stage uses the first microbatch's positions and masks for all microbatches.

    Reference: class of pipeline stages whose keyword arguments are not split with the batch
    Class: C4
    Technique: FSDP 2, PP 2, 1F1B
    Module: layers.[23].attention.rope or the model
    First step: 1
    Signature: the loss is off from step 1; documents mix in the second half of the layers
    Cause: forward or objective
    """
    step = trainer.pp_schedule.step

    def stepping(*arguments: Any, kwarg_mbs: list[dict[str, Any]], **options: Any) -> Any:
        if not trainer.pp_has_first_stage:
            kwarg_mbs = [dict(kwarg_mbs[0]) for _ in kwarg_mbs]
        return step(*arguments, kwarg_mbs=kwarg_mbs, **options)

    trainer.pp_schedule.step = stepping


def activation_is_quick_gelu(trainer: Any) -> None:
    """The fused feed-forward kernel computes QuickGELU, x sigmoid(1.702 x), instead of SiLU.

    Reference: class of a fused gated MLP that ignores the configured activation
    Class: C4
    Technique: HSDP 2 x 2
    Module: layers.*.feed_forward
    First step: 1
    Signature: the loss is a little off from step 1, gradients of w1, w2 and w3 more
    Cause: forward or objective
    """

    def make(module: Any) -> Any:
        def fused(x: Any) -> Any:
            gate = module.w1(x)
            return module.w2(gate * torch.sigmoid(1.702 * gate) * module.w3(x))

        return fused

    for module in modules(trainer, "feed_forward"):
        replace_forward(module, lambda _, module=module: make(module))
