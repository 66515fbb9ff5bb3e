"""Gradients of torchtitan 0.2.2 as they should be: its bugs 2972 and 2318 repaired, as techniques.

Techniques of an experiment, not fixes of the CPU shim: a set that does not name them trains as
torchtitan was released, and fails. See ``four_d.toml``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def divide_pipeline_gradients(trainer: Any) -> None:
    """Divide what a pipeline schedule differentiates by the valid tokens of the global batch.

    torchtitan issue 2972 (0.2.2): ``forward_backward_step`` divides the losses that the schedule
    returns, after it has gone backward through their sum.
    """
    if not trainer.parallel_dims.pp_enabled:
        return
    step, schedule = trainer.forward_backward_step, trainer.pp_schedule
    sum_of_losses = schedule._loss_fn  # noqa: SLF001 - a schedule's loss has no public name

    @functools.wraps(step)
    def divided(*, global_valid_tokens: torch.Tensor | float, **batch: Any) -> torch.Tensor:
        def loss(*arguments: Any, **more: Any) -> torch.Tensor:
            return sum_of_losses(*arguments, **more) / global_valid_tokens

        schedule._loss_fn = loss  # noqa: SLF001
        trainer.repaired = "pipeline"
        return step(global_valid_tokens=1, **batch)  # the losses are divided already

    trainer.forward_backward_step = divided


def sum_replicas_gradients(trainer: Any) -> None:
    """Undo DDP's division by its degree: the loss is divided by the tokens of all replicas already.

    torchtitan issue 2318 (0.2.2). The loss is multiplied by the degree before it is differentiated
    and divided by it for the log.
    """
    dims = trainer.parallel_dims
    if not dims.dp_replicate_enabled or dims.fsdp_enabled:
        return
    step, degree = trainer.forward_backward_step, dims.dp_replicate

    @functools.wraps(step)
    def summed(*, global_valid_tokens: torch.Tensor | float, **batch: Any) -> torch.Tensor:
        trainer.repaired = "replicas"
        return step(global_valid_tokens=global_valid_tokens / degree, **batch) / degree

    trainer.forward_backward_step = summed


def was_repaired(trainer: Any) -> bool:
    """Whether one of the above was at work in a step."""
    return hasattr(trainer, "repaired")
