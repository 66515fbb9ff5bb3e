"""Held out, C5: only the reported number is wrong."""

from __future__ import annotations

from typing import Any

import torch


def norm_after_clipping(trainer: Any) -> None:
    """The reported grad norm is the one after clipping: never above the limit.

    Reference: class of torchtitan issues 596 and 766
    Class: C5
    Technique: FSDP 2
    First step: 1
    Needs: clipping active
    Signature: the reported grad norm is .2 at every step; gradients, weights and loss are right
    Cause: metric only
    Says: grad norm | gradient norm | norm
    """
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_
    limit = trainer.config.training.max_norm

    def clipped(*arguments: Any, **options: Any) -> torch.Tensor:
        return clip(*arguments, **options).clamp(max=limit)

    utils.clip_grad_norm_ = clipped


def last_microbatch_reported(trainer: Any) -> None:
    """The reported loss is that of the last microbatch, times the accumulation steps.

    Reference: nanochat pull 52 and pull 515, nanoGPT pull 207
    Class: C5
    Technique: FSDP 2, 2 accumulation steps
    First step: 1
    Signature: the reported loss is noisier than the recomputed one; training is right
    Cause: metric only
    Says: loss
    """
    forward_backward = trainer.forward_backward_step
    steps = trainer.gradient_accumulation_steps
    calls = 0

    def reporting(**options: Any) -> torch.Tensor:
        nonlocal calls
        loss = forward_backward(**options).detach()
        calls += 1
        return loss * steps if calls % steps == 0 else torch.zeros_like(loss)

    trainer.forward_backward_step = reporting
