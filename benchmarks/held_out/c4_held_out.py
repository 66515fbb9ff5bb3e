"""Held out, C4: the forward pass or the objective is another one."""

from __future__ import annotations

from typing import Any

import torch


def documents_attend_each_other(trainer: Any) -> None:
    """The mask of packed documents is plain causal: a document sees those before it.

    Reference: functionary issue 265; class of torchtitan issue 2559
    Class: C4
    Technique: DDP 2
    Module: layers.*.attention.inner_attention
    First step: 1
    Needs: packed documents
    Signature: the loss differs at step 1, with the same weights and samples
    Cause: forward or objective
    """
    model = trainer.model_parts[0]
    masks = model.get_attention_masks

    def causal(positions: torch.Tensor) -> Any:
        whole = torch.arange(positions.shape[1], device=positions.device)
        return masks(positions=whole.expand_as(positions).contiguous())

    model.get_attention_masks = causal


def labels_shifted_twice(trainer: Any) -> None:
    """Labels that the loader has shifted are shifted again by the loss: t learns t + 2.

    The last target of a row is drawn from the next row, so shapes agree.

    Reference: transformers issue 47394, pull 46898
    Class: C4
    Technique: FSDP 2
    Module: loss
    First step: 1
    Signature: the loss differs at step 1 by little, and stays high afterwards
    Cause: forward or objective
    """
    compute = trainer.loss_fn

    def shifting(pred: torch.Tensor, labels: torch.Tensor, *rest: Any, **options: Any) -> Any:
        twice = labels.flatten().roll(-1).view_as(labels)
        return compute(pred, twice, *rest, **options)

    trainer.loss_fn = shifting


def local_positions_under_cp(trainer: Any) -> None:
    """Under CP every rank counts its own tokens from 0 for the rotary embedding.

    The cache is sliced by the local length, and not by where the rank's tokens lie.

    Reference: Megatron-LM pull 5243, pull 1612, issue 560
    Class: C4
    Technique: FSDP 2 x CP 2
    Module: layers.*.attention.rope
    First step: 1
    Signature: the loss differs at step 1, with the same weights and samples
    Cause: forward or objective
    """
    process = trainer.post_dataloading_process

    def processing(*arguments: Any, **options: Any) -> Any:
        inputs, labels, extra = process(*arguments, **options)
        positions = extra["positions"]
        counted = torch.arange(inputs.shape[1], device=inputs.device, dtype=positions.dtype)
        extra["positions"] = counted.expand(inputs.shape[0], -1).contiguous()
        return inputs, labels, extra

    trainer.post_dataloading_process = processing


def half_precision_between_stages(trainer: Any) -> None:
    """Pipeline stages send activations and their gradients in bf16; all else is fp32.

    Reference: class of torchtitan issue 2575 (``pipeline_dtype`` of Megatron-LM)
    Class: C4
    Technique: FSDP 2 x PP 2, 1F1B
    Module: the model
    First step: 1
    Signature: the loss of step 1 differs by bf16 rounding of one activation; gradients differ more
    Cause: forward or objective
    """
    if trainer.pp_has_first_stage:
        return

    def cast(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (arguments[0].bfloat16().float(), *arguments[1:])

    trainer.model_parts[0].register_forward_pre_hook(cast)


def ignored_labels_counted(trainer: Any) -> None:
    """The loss is divided by all tokens of the step, those with ignored labels included.

    Reference: class of transformers issue 34191, torchtitan issue 2206
    Class: C4
    Technique: FSDP 2, 2 accumulation steps
    Module: loss
    First step: 1
    Needs: ignored labels
    Signature: loss and gradients .8% too small
    Cause: forward or objective
    """
    forward_backward = trainer.forward_backward_step
    training = trainer.config.training
    tokens = training.global_batch_size * training.seq_len

    def counting(**options: Any) -> Any:
        options["global_valid_tokens"] = torch.full_like(options["global_valid_tokens"], tokens)
        return forward_backward(**options)

    trainer.forward_backward_step = counting
