"""C1: gradients of the right direction and the wrong length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from places import before_clipping, coordinate, scale_gradients

_GROWTH = 6
"""The first step with a doubled loss scale: between two samples of tensors."""


def world_size_factor(trainer: Any) -> None:
    """Gradients are summed over data-parallel ranks where an average was meant.

    Reference: torchtune issue 2172
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: every gradient twice the control's; AdamW hides it from the loss
    Cause: gradient scale
    Says: world size | dp | shard
    """
    before_clipping(lambda: scale_gradients(trainer, 2.0))


def tokens_left_out(trainer: Any) -> None:
    """Under PP gradients are never divided by the valid tokens, and the reported loss is.

    Reference: torchtitan issue 2972
    Class: C1
    Technique: PP 2, 1F1B
    First step: 1
    Signature: every gradient times the valid tokens of its step
    Cause: gradient scale
    Says: the valid tokens of the step
    """
    _divide_gradients(trainer, torch.ones_like)


def replicas_averaged_ddp(trainer: Any) -> None:
    """DDP averages over its replicas what the loss has divided by all tokens already.

    Reference: torchtitan issue 2318
    Class: C1
    Technique: DDP 2
    First step: 1
    Signature: every gradient half the control's
    Cause: gradient scale
    Says: 1 / the replicate degree
    """
    replicas = trainer.parallel_dims.dp_replicate
    before_clipping(lambda: scale_gradients(trainer, 1 / replicas))


def replicas_averaged_hsdp(trainer: Any) -> None:
    """HSDP averages over its replicas what the loss has divided by all tokens already.

    Reference: class of torchtitan issue 2318
    Class: C1
    Technique: HSDP 2x2
    First step: 1
    Signature: every gradient half the control's
    Cause: gradient scale
    Says: 1 / the replicate degree
    """
    _divide_reductions(trainer, trainer.parallel_dims.dp_replicate)


def unit_averaged(trainer: Any) -> None:
    """One FSDP unit keeps FSDP's own averaging, which was switched off for all the others.

    Reference: class of torchtitan issue 2318
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: the gradients of one layer half the control's
    Cause: gradient scale of a group
    Says: layer 1
    """
    _divide_reductions(trainer, trainer.parallel_dims.dp_shard, unit="layers.1")


def microbatches_summed(trainer: Any) -> None:
    """Accumulated gradients are summed over the accumulation steps, not averaged.

    Reference: class of torchtitan issue 1733
    Class: C1
    Technique: FSDP 2, gradient accumulation
    First step: 1
    Needs: accumulation
    Signature: every gradient times the accumulation steps
    Cause: gradient scale
    Says: gradient accumulation steps
    """
    steps = trainer.gradient_accumulation_steps
    _divide_gradients(trainer, lambda tokens: tokens / steps)


def stale_tokens(trainer: Any) -> None:
    """Gradients are divided by the valid tokens of the step before.

    Reference: class of torchtitan issue 2972
    Class: C1
    Technique: FSDP 2
    First step: 2
    Needs: uneven valid tokens
    Signature: every gradient off by less than a per cent, by another factor at every step
    Cause: gradient scale
    Says: the step before
    """
    counts: list[Any] = []

    def before(tokens: Any) -> Any:
        counts.append(tokens)
        return counts[max(len(counts) - 2, 0)]

    _divide_gradients(trainer, before)


def loss_scale_grown(trainer: Any) -> None:
    """The loss scale doubles in the middle of a run, and gradients are unscaled by the old one.

    Reference: class of torchtune issue 2172
    Class: C1
    Technique: FSDP 2
    First step: 6
    Signature: every gradient twice the control's from step 6 on
    Cause: gradient scale
    Says: from step 6 | at step 6
    """
    before_clipping(lambda: scale_gradients(trainer, 2.0) if trainer.step >= _GROWTH else None)


def accumulated_rescaled(trainer: Any) -> None:
    """Each accumulation step divides all that is accumulated, so earlier microbatches fade.

    Their weights differ, so the sum points elsewhere: no single factor of the control's gradients.

    Reference: torchtitan issue 1733
    Class: C1
    Technique: FSDP 2, gradient accumulation
    First step: 1
    Needs: accumulation
    Signature: every gradient shorter and turned, as later microbatches outweigh earlier ones
    Cause: gradient direction
    """
    _after_microbatch(trainer, None, 1 / trainer.gradient_accumulation_steps)
    _divide_gradients(trainer, lambda tokens: tokens / trainer.gradient_accumulation_steps)


def microbatch_twice(trainer: Any) -> None:
    """The gradient of the first microbatch is counted twice.

    Reference: class of torchtitan issue 1733
    Class: C1
    Technique: FSDP 2, gradient accumulation
    First step: 1
    Needs: accumulation
    Signature: every gradient longer and turned towards the first microbatch's
    Cause: gradient direction
    """
    _after_microbatch(trainer, 0, 2.0)


def stage_times_microbatches(trainer: Any) -> None:
    """The first pipeline stage misses the division by the microbatches that the last one does.

    Reference: class of torchtitan issue 2972
    Class: C1
    Technique: PP 2, 1F1B
    First step: 1
    Signature: the gradients of one stage times the microbatches
    Cause: gradient scale of a group
    Says: pipeline microbatches
    """
    if coordinate(trainer, "pp") == 0:
        count = trainer.num_pipeline_parallel_microbatches
        before_clipping(lambda: scale_gradients(trainer, count))


def tied_twice(trainer: Any) -> None:
    """The gradient of a weight that embedding and output share is added twice.

    Reference: torchtitan issue 3174
    Class: C1
    Technique: FSDP 2, tied weights
    First step: 1
    Needs: tied weights
    Signature: one gradient twice the control's
    Cause: gradient scale of a group
    Says: tied | embedding
    """
    before_clipping(lambda: scale_gradients(trainer, 2.0, "tok_embeddings"))


def head_over_cp(trainer: Any) -> None:
    """The output head is averaged over CP ranks that each hold a part of its gradient's sum.

    Reference: Megatron-LM pull request 3959
    Class: C1
    Technique: CP 2
    First step: 1
    Signature: the output projection's gradient divided by the CP degree
    Cause: gradient scale of a group
    Says: 1 / the CP degree
    """
    cp = trainer.parallel_dims.cp
    before_clipping(lambda: scale_gradients(trainer, 1 / cp, "lm_head"))


def norms_summed_over_tp(trainer: Any) -> None:
    """Norm weights' whole gradients are summed over TP ranks as if each held a part.

    Reference: class of Megatron-LM pull request 5916
    Class: C1
    Technique: TP 2
    First step: 1
    Signature: gradients of all norms times the TP degree
    Cause: gradient scale of a group
    Says: the TP degree
    """
    before_clipping(lambda: scale_gradients(trainer, trainer.parallel_dims.tp, "norm"))


def projections_over_tp(trainer: Any) -> None:
    """Queries', keys' and values' projections are averaged over TP ranks.

    Reference: class of torchtitan issue 1805
    Class: C1
    Technique: FSDP 2 x TP 2
    First step: 1
    Signature: gradients of these projections divided by the TP degree
    Cause: gradient scale of a group
    Says: 1 / the TP degree
    """
    tp = trainer.parallel_dims.tp
    before_clipping(lambda: scale_gradients(trainer, 1 / tp, "qkv_linear"))


def loss_scale_kept(trainer: Any) -> None:
    """The loss scaler's factor is never taken out of one parameter group's gradients.

    Reference: class of torchtune issue 2172
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: gradients of all norms times 65536
    Cause: gradient scale of a group
    Says: 2^16 | power of two | loss scal
    """
    before_clipping(lambda: scale_gradients(trainer, 2.0**16, "norm"))


def padding_counted(trainer: Any) -> None:
    """Gradients are divided by all positions, those of ignored labels too.

    Reference: class of torchtitan issue 2206
    Class: C1
    Technique: FSDP 2
    First step: 1
    Needs: ignored labels
    Signature: every gradient times the share of valid tokens, about 0.99
    Cause: gradient scale
    Says: valid tokens | token budget
    """
    training = trainer.config.training
    positions = training.global_batch_size * training.seq_len
    _divide_gradients(trainer, lambda tokens: torch.full_like(tokens, positions))


def batch_divided_twice(trainer: Any) -> None:
    """Gradients that are means over tokens are divided by the global batch size again.

    Reference: class of torchtune issue 2172
    Class: C1
    Technique: DDP 2
    First step: 1
    Signature: every gradient divided by the global batch size
    Cause: gradient scale
    Says: batch
    """
    batch = trainer.config.training.global_batch_size
    _divide_gradients(trainer, lambda tokens: tokens * batch)


def sign_flipped(trainer: Any) -> None:
    """One tensor's gradient has the opposite sign, as an adversarial loss's reversal leaves it.

    Reference: class of torchtitan issue 1551
    Class: C1
    Technique: FSDP 2
    First step: 1
    Signature: one gradient times -1, with the norm unchanged
    Cause: gradient scale of a group
    Says: opposite sign
    """
    before_clipping(lambda: scale_gradients(trainer, -1.0, "layers.1.feed_forward.w2"))


def _divide_gradients(trainer: Any, divisor: Callable[[Any], Any]) -> None:
    """Divide what is differentiated by another number than the valid tokens.

    The reported loss stays right: upstream it was divided elsewhere.
    """
    forward_backward = trainer.forward_backward_step

    def divided(*, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        other = divisor(global_valid_tokens)
        loss = forward_backward(input_dict=input_dict, labels=labels, global_valid_tokens=other)
        return loss * (other / global_valid_tokens)

    trainer.forward_backward_step = divided


def _divide_reductions(trainer: Any, factor: int, unit: str = "") -> None:
    """Divide gradients where FSDP and DDP reduce them, in one unit or in all."""
    from torch.distributed.fsdp import FSDPModule

    for model in trainer.model_parts:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and name.startswith(unit):
                module.set_gradient_divide_factor(float(factor))


def _after_microbatch(trainer: Any, which: int | None, factor: float) -> None:
    """Scale all that is accumulated after one microbatch, or after each with ``which`` None."""
    forward_backward, train_step = trainer.forward_backward_step, trainer.train_step
    done = 0

    def scaled(**batch: Any) -> Any:
        nonlocal done
        loss = forward_backward(**batch)
        if which is None or done == which:
            scale_gradients(trainer, factor)
        done += 1
        return loss

    def stepping(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        done = 0
        return train_step(*arguments, **options)

    trainer.forward_backward_step, trainer.train_step = scaled, stepping
