"""C3: ranks that hold the same tensor come to hold different numbers."""

from __future__ import annotations

from typing import Any

import torch
from backward import modules, skip_all_reduce, take_partial_as_whole
from places import before_clipping, before_step, before_update, coordinate, local, parameters


def _clip_on_first(trainer: Any, dimension: str, part: str = "") -> None:
    """Give the ranks past the first of a mesh dimension their unclipped gradients back."""
    kept: list[tuple[Any, torch.Tensor]] = []

    def keep() -> None:
        kept[:] = [
            (parameter, local(parameter.grad).clone()) for _, parameter in parameters(trainer, part)
        ]

    def restore() -> None:
        for parameter, gradient in kept:
            local(parameter.grad).copy_(gradient)

    if coordinate(trainer, dimension) > 0:
        before_clipping(keep)
        before_update(restore)


def norms_clipped_on_one_tp_rank(trainer: Any) -> None:
    """The norms, which TP replicates, are clipped on the first TP rank only.

    BLOOM was trained so; its copies of the norms drifted apart for months, and a merged
    checkpoint was 1 to 5% worse.

    Reference: DeepSpeed issue 1801
    Class: C3
    Technique: TP 2, clipping
    First step: 1
    Needs: clipping at work
    Signature: optimizer state of norms differs along tp after step 1, their gradients do not
    Cause: replicas differ
    Says: clipping | update differs
    """
    _clip_on_first(trainer, "tp", "norm")


def one_replica_clipped(trainer: Any) -> None:
    """The first data-parallel replica alone clips its gradients.

    Reference: class of DeepSpeed issue 1801
    Class: C3
    Technique: DDP 2, clipping
    First step: 1
    Needs: clipping at work
    Signature: optimizer state of every tensor differs between replicas after step 1
    Cause: replicas differ
    Says: update differs
    """
    _clip_on_first(trainer, "dp_replicate")


def initial_weights_not_synchronised(trainer: Any) -> None:
    """The second replica begins with weights of its own.

    Reference: torchtitan issue 166
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: parameters differ between replicas before the first step
    Cause: replicas differ
    Says: began with other values
    """

    def draw_again() -> None:
        random = torch.Generator().manual_seed(1)
        for _, parameter in parameters(trainer):
            weights = local(parameter.data)
            order = torch.randperm(weights.numel(), generator=random)
            weights.copy_(weights.flatten()[order].view_as(weights))

    if coordinate(trainer, "dp_replicate") > 0:
        before_step(trainer, 1, draw_again)


def norm_gradient_never_reduced(trainer: Any) -> None:
    """One norm's partial gradient stays on each TP rank, and its copies drift.

    Reference: Megatron-LM issue 7452
    Class: C3
    Technique: TP 2 with sequence parallel
    First step: 1
    Signature: one norm's gradient differs along tp from the first step on
    Cause: replicas differ
    Says: layers.2.ffn_norm.weight
    """
    take_partial_as_whole("layers.2.ffn_norm")


def bucket_forgotten(trainer: Any) -> None:
    """One layer's gradients are not reduced over the replicas.

    Reference: class of Megatron-LM issue 599
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: gradients of layer 1 differ between replicas from the first step on
    Cause: replicas differ
    Says: layers.1
    """
    skip_all_reduce("layers.1.")


def late_all_reduce_skipped(trainer: Any) -> None:
    """From step 5 on the embeddings are reduced within each replica alone.

    Reference: class of Megatron-LM issue 599
    Class: C3
    Technique: HSDP 2x2
    First step: 5
    Signature: the embeddings differ along dp_replicate after step 4
    Cause: replicas differ
    Says: dp_replicate
    """
    skip_all_reduce("tok_embeddings", lambda: trainer.step >= 5)


def one_rank_learns_faster(trainer: Any) -> None:
    """One replica's optimizer uses a learning rate that is 5% higher.

    Reference: class of Megatron-LM pull request 5916
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: parameters differ between replicas after step 1, their gradients do not
    Cause: replicas differ
    Says: update differs
    """

    def raise_rate() -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 1.05

    if coordinate(trainer, "dp_replicate") > 0:
        before_update(raise_rate)


def one_rank_decays_weights(trainer: Any) -> None:
    """One TP rank's optimizer has no weight decay for what it shares with the others.

    Reference: class of DeepSpeed issue 1801
    Class: C3
    Technique: TP 2
    First step: 1
    Signature: norms differ along tp after step 1, their gradients do not
    Cause: replicas differ
    Says: update differs
    """
    if coordinate(trainer, "tp") > 0:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0


def one_rank_updates_in_bfloat16(trainer: Any) -> None:
    """One replica rounds what it adds to its weights to bfloat16.

    Reference: class of DeepSpeed issue 7985
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: parameters differ between replicas after step 1; gradients and moments do not
    Cause: replicas differ
    Says: update differs
    Regimes: fp32 | mixed | float8 (with parameters in bfloat16 every rank rounds its updates so)
    """
    if coordinate(trainer, "dp_replicate") == 0:
        return
    before: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        before[:] = [local(parameter.data).clone() for _, parameter in parameters(trainer)]

    def round_update(*_: Any) -> None:
        for (_, parameter), old in zip(parameters(trainer), before, strict=True):
            moved = (local(parameter.data) - old).bfloat16()
            local(parameter.data).copy_(old + moved)

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(round_update)


def buffer_of_one_rank(trainer: Any) -> None:
    """One replica has built its rotary cache for another base frequency in one layer.

    Reference: class of torchtitan issue 3686
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: a buffer differs between replicas before the first step
    Cause: replicas differ
    Says: rope.cache
    """

    def rebuild() -> None:
        for module in modules(trainer, "layers.0.attention.rope"):
            cache = local(module.cache)
            cache.copy_(torch.polar(cache.abs(), cache.angle() * 0.5))

    if coordinate(trainer, "dp_replicate") > 0:
        before_step(trainer, 1, rebuild)


def one_rank_skips_a_step(trainer: Any) -> None:
    """One replica takes step 7 for an overflow and leaves its weights as they are.

    Reference: class of DeepSpeed issue 1801
    Class: C3
    Technique: DDP 2
    First step: 7
    Signature: parameters and optimizer state differ between replicas after step 7
    Cause: replicas differ
    """
    if coordinate(trainer, "dp_replicate") == 0:
        return
    update = trainer.optimizers.step

    def skipping(*arguments: Any, **options: Any) -> None:
        if trainer.step != 7:
            update(*arguments, **options)

    trainer.optimizers.step = skipping
