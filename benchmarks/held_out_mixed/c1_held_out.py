"""Held out in bf16 mixed, C1: gradients of all or of a group of parameters have a wrong scale."""

from __future__ import annotations

from typing import Any

from places import before_clipping, scale_gradients


def head_group_keeps_division(trainer: Any) -> None:
    """The FSDP module of the last norm and ``lm_head`` keeps FSDP's division by the shard degree.

    The loss is divided by the tokens of all ranks, so the gradients of that group are halved.

    Reference: class of pytorch/torchtitan#2318 (division by the data-parallel degree left on)
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: gradients of norm.weight and lm_head.weight are half; all others are right
    Cause: gradient scale of a group
    """
    for model in trainer.model_parts:
        if model.lm_head is not None:
            model.lm_head.set_gradient_divide_factor(2.0)


def divisor_leaves_out_prefix(trainer: Any) -> None:
    """The count that divides gradients leaves out 16 of the 256 tokens of every sequence.

    The gradients are summed over all tokens nonetheless, and are 256/240 of the right ones.

    Reference: class of huggingface/transformers#34191 (normalised by a wrong number of items)
    Class: C1
    Technique: FSDP 2, gradient accumulation 2
    First step: 1
    Signature: the gradient norm is 6.7% too large, in all parameters alike; clipping hides it
    Cause: gradient scale
    """
    before_clipping(lambda: scale_gradients(trainer, 256 / 240))


def stale_scale_of_w2_gradient(trainer: Any) -> None:
    """The weight gradient of w2 is taken out of float8 with a stale scale, 6% too small.

    Reference: class of NVIDIA/TransformerEngine delayed scaling (amax of an earlier step)
    Class: C1
    Technique: FSDP 2, CP 2
    First step: 1
    Signature: gradients of feed_forward.w2.weight are 0.94 of the right ones
    Cause: gradient scale of a group
    """
    before_clipping(lambda: scale_gradients(trainer, 0.94, "feed_forward.w2"))


def norm_gradients_averaged_over_tp(trainer: Any) -> None:
    """With sequence parallelism, gradients of norms are averaged over TP ranks instead of summed.

    Reference: class of NVIDIA/Megatron-LM allreduce_layernorm_grads (sequence parallel norms)
    Class: C1
    Technique: FSDP 2, TP 2
    First step: 1
    Signature: gradients of attention_norm, ffn_norm and norm are half
    Cause: gradient scale of a group
    """
    before_clipping(lambda: scale_gradients(trainer, 0.5, "norm.weight"))


def pipeline_divides_by_microbatches(trainer: Any) -> None:
    """The pipeline schedule divides gradients by its microbatches although the loss is a sum.

    Reference: class of pytorch/torchtitan#1733 and ``scale_grads`` of torch's pipelining
    Class: C1
    Technique: FSDP 2, PP 2, 1F1B
    First step: 1
    Signature: the gradient norm is a quarter, in all parameters alike; the loss is right
    Cause: gradient scale
    """
    trainer.pp_schedule.scale_grads = True
