"""Held out, C6: data, optimizer state and schedules that are not what they should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from places import before_step, parameters


def schedule_stepped_per_rank(trainer: Any) -> None:
    """The learning rate scheduler steps once per rank at every optimizer step.

    With two ranks the decay begins at step 6 instead of 10; the end of the schedule is kept.

    Reference: accelerate issues 2926, 2142 and 1398; transformers pull 24088
    Class: C6
    Technique: FSDP 2
    First step: 6
    Signature: learning rates differ from step 6 on, the loss from step 7 on
    Cause: learning rate
    """
    schedulers = trainer.lr_schedulers
    last = trainer.config.training.steps - 1
    step = schedulers.step

    def stepping() -> None:
        for _ in range(trainer.parallel_dims.world_size):
            if schedulers.schedulers[0].last_epoch < last:
                step()

    schedulers.step = stepping


def moments_lost(trainer: Any) -> None:
    """Before step 6 the optimizer's moments are gone, as after a resume that dropped them.

    Weights, data, and learning rate go on as they were; Adam begins anew.

    Reference: KempnerForge pull 115 and issue 114, OneVision-Encoder pull 65
    Class: C6
    Technique: FSDP 2, resume
    First step: 6
    Signature: gradients of step 6 are right, its update is not; the loss differs from step 7 on
    Cause: state lost
    """

    def forget() -> None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()

    before_step(trainer, 6, forget)


def loader_buffer_reused(trainer: Any) -> None:
    """The loader's double buffer is filled anew too early: two microbatches are one and the same.

    Reference: class of accelerate issue 4204
    Class: C6
    Technique: FSDP 2, 2 accumulation steps
    First step: 1
    Signature: half of the samples of every step come twice, the other half never
    Cause: data
    """
    generate = trainer.batch_generator

    def generating(*arguments: Any, **options: Any) -> Iterator[Any]:
        batches = generate(*arguments, **options)
        for _, (inputs, labels) in zip(batches, batches, strict=False):
            yield {key: value.clone() for key, value in inputs.items()}, labels.clone()
            yield inputs, labels

    trainer.batch_generator = generating


def weight_not_in_optimizer(trainer: Any) -> None:
    """One weight was replaced after the optimizer was built, which so never updates it.

    Reference: class of pytorch's rule to build optimizers after fully_shard
    Class: C6
    Technique: FSDP 2
    First step: 1
    Signature: layers.3.feed_forward.w2 keeps its initial values, with right gradients at step 1
    Cause: parameters do not move
    Says: layers.3 | w2
    """
    (lost,) = (parameter for _, parameter in parameters(trainer, "layers.3.feed_forward.w2"))
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            kept = [i for i, parameter in enumerate(group["params"]) if parameter is not lost]
            group["params"] = [group["params"][i] for i in kept]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in kept]
