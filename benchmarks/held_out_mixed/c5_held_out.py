"""Held out in bf16 mixed, C5: only a reported metric is wrong."""

from __future__ import annotations

from typing import Any

from hooks import count_microbatches


def reported_loss_of_last_microbatch(trainer: Any) -> None:
    """The reported loss is that of the last accumulation microbatch, not the mean over all.

    Reference: class of pytorch/torchtitan's loss metric under gradient accumulation
    Class: C5
    Technique: FSDP 2, gradient accumulation 2
    First step: 1
    Signature: the reported loss is noisy by some percent; gradients and weights are right
    Cause: metric only
    """
    count = count_microbatches(trainer)
    forward_backward = trainer.forward_backward_step
    microbatches = trainer.gradient_accumulation_steps

    def reported(*arguments: Any, **options: Any) -> Any:
        loss = forward_backward(*arguments, **options).detach()
        return loss * (microbatches if count["now"] == microbatches - 1 else 0)

    trainer.forward_backward_step = reported
