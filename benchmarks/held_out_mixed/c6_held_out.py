"""Held out in bf16 mixed, C6: inputs, learning rate, optimizer and state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from hooks import replace_update
from places import Action, local, rank


def rank_repeats_microbatch(trainer: Any) -> None:
    """Rank 1's loader gives the first microbatch of a step again as its second one.

    Reference: class of huggingface/accelerate#4204 (samples seen twice)
    Class: C6
    Technique: FSDP 2, gradient accumulation 2
    First step: 1
    Signature: a quarter of a step's samples is replaced by copies of others
    Cause: data
    """
    generate = trainer.batch_generator

    def repeat(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            inputs, labels = batch
            kept = {name: value.clone() for name, value in inputs.items()}, labels.clone()
            yield batch
            next(batches)
            yield kept

    def generated(loader: Any) -> Iterator[Any]:
        batches = generate(loader)
        return repeat(batches) if rank() == 1 else batches

    trainer.batch_generator = generated


def decay_follows_cosine(trainer: Any) -> None:
    """The learning rate decays along a cosine instead of the configured line.

    Reference: class of a scheduler option that is parsed and not passed on
    Class: C6
    Technique: FSDP 2, CP 2
    First step: 10
    Signature: warm-up and plateau are right; at step 10 the rate is 9% too large
    Needs: 16 steps, of which the last 8 decay
    Cause: learning rate
    """
    for scheduler in trainer.lr_schedulers:
        scheduler.lr_lambdas = [
            partial(factor.func, **{**factor.keywords, "lr_decay_type": "cosine"})
            for factor in scheduler.lr_lambdas
        ]


def epsilon_of_another_adam(trainer: Any) -> None:
    """AdamW has an epsilon of 1e-6 instead of 1e-8.

    Reference: class of a default that replaces a configured epsilon (1e-6 in some recipes)
    Class: C6
    Technique: FSDP 2, TP 2
    First step: 1
    Signature: gradients are right at step 1; updates are too small where gradients are small
    Cause: update
    """
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["eps"] = 1e-6


def second_moment_in_float8(trainer: Any) -> None:
    """AdamW's second moments are kept in float8 (e5m2, a scale per tensor) between steps.

    Reference: class of 8-bit optimizer states without blocks (bitsandbytes, torchao)
    Class: C6
    Technique: FSDP 2, PP 2, 1F1B
    First step: 2
    Signature: gradients and the first update are right; later updates are off by some percent
    Cause: update
    """

    def make(step: Action) -> Action:
        def kept(*arguments: Any, **options: Any) -> None:
            step(*arguments, **options)
            for optimizer in trainer.optimizers:
                for state in optimizer.state.values():
                    moment = local(state["exp_avg_sq"])
                    scale = moment.amax().clamp(min=1e-30) / 57344
                    moment.copy_((moment / scale).to(torch.float8_e5m2).float() * scale)

        return kept

    replace_update(trainer, make)
