"""C5: training is right, and the number that people look at is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from places import local, parameters


def loss_over_cp(trainer: Any) -> None:
    """The displayed loss is averaged over CP ranks that each hold a part of its sum.

    Reference: torchtitan issues 3280 and 3329
    Class: C5
    Technique: CP 2
    First step: 1
    Signature: the reported loss divided by the CP degree
    Cause: metric only
    Says: 1 / the CP degree
    """
    cp = trainer.parallel_dims.cp
    _reduce_loss(lambda summed, *_: summed / cp)


def loss_of_rank(_: Any) -> None:
    """The displayed loss is this rank's share of the sum: nothing reduces it.

    Reference: class of torchtitan issue 3280
    Class: C5
    Technique: FSDP 2
    First step: 1
    Signature: the reported loss about half the control's, by another factor at every step
    Cause: metric only
    Says: loss
    """
    _reduce_loss(lambda _, loss, __: float(loss))


def loss_times_replicas(trainer: Any) -> None:
    """The displayed loss is summed over replicas that all have the whole of it.

    Reference: torchtitan issue 4663
    Class: C5
    Technique: DDP 2
    First step: 1
    Signature: the reported loss times the replicate degree
    Cause: metric only
    Says: the replicate degree
    """
    replicas = trainer.parallel_dims.dp_replicate
    _reduce_loss(lambda summed, *_: summed * replicas)


def loss_mean_of_ranks(trainer: Any) -> None:
    """The displayed loss is the mean of the ranks' means, not the mean over tokens.

    Reference: class of torchtitan issue 2206
    Class: C5
    Technique: FSDP 2
    First step: 1
    Needs: uneven valid tokens
    Signature: the reported loss off by little, by no constant factor
    Cause: metric only
    Says: loss
    """
    from torchtitan.components.loss import IGNORE_INDEX

    ranks = trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard

    def mean(loss: Any, labels: Any, tokens: Any) -> Any:
        return loss * tokens / ((labels != IGNORE_INDEX).sum() * ranks)

    _return_loss(trainer, mean)


def loss_of_last_microbatch(trainer: Any) -> None:
    """The displayed loss is the last microbatch's, not the mean over all that accumulate.

    Reference: class of transformers issue 34191
    Class: C5
    Technique: FSDP 2, gradient accumulation
    First step: 1
    Needs: accumulation
    Signature: the reported loss off by some per cent, by no constant factor
    Cause: metric only
    Says: loss
    """
    steps, seen = trainer.gradient_accumulation_steps, 0

    def last(loss: Any, *_: Any) -> Any:
        nonlocal seen
        seen += 1
        return loss * (steps if seen % steps == 0 else 0)

    _return_loss(trainer, last)


def microbatch_losses_summed(trainer: Any) -> None:
    """The displayed loss is the sum of the microbatches' means.

    Reference: class of transformers issue 34191
    Class: C5
    Technique: FSDP 2, gradient accumulation
    First step: 1
    Needs: accumulation
    Signature: the reported loss times the accumulation steps
    Cause: metric only
    Says: gradient accumulation steps
    """
    steps = trainer.gradient_accumulation_steps
    _return_loss(trainer, lambda loss, *_: loss * steps)


def loss_in_bf16(_: Any) -> None:
    """The displayed loss is reduced in bfloat16, so that its curve has stairs.

    Reference: class of torchtitan issue 2575
    Class: C5
    Technique: FSDP 2
    First step: 1
    Signature: the reported loss off by up to 0.4%, to and fro
    Cause: metric only
    Says: loss
    """
    from torch.distributed import _functional_collectives as collectives

    def coarse(_: float, loss: Any, mesh: Any) -> float:
        return float(collectives.all_reduce(loss.to(torch.bfloat16), "sum", mesh))

    _reduce_loss(coarse)


def loss_lags(_: Any) -> None:
    """The displayed loss is the step's before: it was copied to the host before it was ready.

    Reference: class of torchtitan issue 3280
    Class: C5
    Technique: FSDP 2
    First step: 2
    Signature: from step 2 on the reported loss is the control's of the step before
    Cause: metric only
    Says: step before | one step | late
    """
    held: list[float] = []

    def late(summed: float, *_: Any) -> float:
        held.append(summed)
        return held[-2] if len(held) > 1 else summed

    _reduce_loss(late)


def norm_after_clipping(trainer: Any) -> None:
    """The displayed grad norm is measured after clipping.

    Reference: class of torchtitan issue 596
    Class: C5
    Technique: FSDP 2
    First step: 1
    Needs: clipping active
    Signature: the reported norm never above the largest that clipping allows
    Cause: metric only
    Says: norm
    """
    _display_norm(after=lambda _: _total(trainer))


def norm_of_shards(trainer: Any) -> None:
    """The displayed grad norm is that of the shards on one rank.

    Reference: class of torchtitan issue 596
    Class: C5
    Technique: FSDP 2
    First step: 1
    Signature: the reported norm too small, by no constant factor
    Cause: metric only
    Says: norm
    """
    _display_norm(before=lambda: _total(trainer, local))


def norm_of_stage(trainer: Any) -> None:
    """The displayed grad norm is that of one pipeline stage; clipping uses the right one.

    Reference: torchtitan issues 596 and 649
    Class: C5
    Technique: PP 2, 1F1B
    First step: 1
    Signature: the reported norm too small, by no constant factor
    Cause: metric only
    Says: norm
    """
    _display_norm(before=lambda: _total(trainer))


def norm_of_stage_clips(_: Any) -> None:
    """Each pipeline stage clips by its own grad norm, and one stage's is displayed.

    Reference: torchtitan issues 596 and 649
    Class: C5
    Technique: PP 2, 1F1B
    First step: 1
    Needs: clipping active
    Signature: the reported norm too small, and stages that move by other factors
    Cause: clipping | metric only
    Says: clip
    """
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def alone(*arguments: Any, **options: Any) -> Any:
        return clip(*arguments, **(options | {"pp_mesh": None}))

    utils.clip_grad_norm_ = alone


def norm_squared(_: Any) -> None:
    """The displayed grad norm misses its square root.

    Reference: class of torchtitan issue 596
    Class: C5
    Technique: DDP 2
    First step: 1
    Signature: the reported norm is the square of the recomputed one
    Cause: metric only
    Says: square
    """
    _display_norm(after=lambda norm: norm**2)


def _reduce_loss(reduced: Callable[[float, Any, Any], float]) -> None:
    """Display what ``reduced(sum, this rank's loss, mesh)`` says of the loss."""
    from torchtitan.distributed import utils

    dist_sum = utils.dist_sum

    def wrong(tensor: Any, mesh: Any = None, **options: Any) -> float:
        summed = dist_sum(tensor, mesh, **options)
        return reduced(summed, tensor, mesh) if tensor.is_floating_point() else summed

    utils.dist_sum = wrong


def _return_loss(trainer: Any, returned: Callable[[Any, Any, Any], Any]) -> None:
    """Display what ``returned(loss, labels, tokens)`` says, after the backward of each microbatch.

    ``loss`` is this rank's share of the mean over all ``tokens`` of the step.
    """
    forward_backward = trainer.forward_backward_step

    def wrong(*, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        loss = forward_backward(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        return returned(loss, labels, global_valid_tokens)

    trainer.forward_backward_step = wrong


def _display_norm(
    before: Callable[[], Any] | None = None, after: Callable[[Any], Any] | None = None
) -> None:
    """Display what ``before()`` measures before clipping, or ``after(norm)`` then makes of it."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def wrong(*arguments: Any, **options: Any) -> Any:
        shown = before() if before else None
        norm = clip(*arguments, **options)
        return after(norm) if after else shown

    utils.clip_grad_norm_ = wrong


def _total(trainer: Any, of: Callable[[Any], Any] = lambda gradient: gradient) -> Any:
    """The norm of this rank's gradients, or of what ``of`` makes of them."""
    gradients = [of(each.grad) for _, each in parameters(trainer) if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
