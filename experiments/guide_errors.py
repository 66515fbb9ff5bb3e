"""Errors that training survives, for experiments/guide_drift.toml.

Each is put into torchtitan's own trainer of a correct set-up; training goes on without any message.
"""

from __future__ import annotations

from typing import Any

import torch

_LAYER = "1"
"""The layer whose weights are stale, and one of whose heads is unscaled."""


def gradients_one_percent_long(trainer: Any) -> None:
    """Every gradient is 1.01 times what it should be; its direction and the loss are right."""
    loss = getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn)
    compute = loss.fn

    def longer(*arguments: Any, **options: Any) -> torch.Tensor:
        value = compute(*arguments, **options)
        # In what the loss sends back, which is float32: in bfloat16, 1.01 would be rounded.
        return value + (value - value.detach()) * 0.01

    loss.fn = longer


def one_head_unscaled(trainer: Any) -> None:
    """The scores of one attention head of one layer are not divided by sqrt(head_dim)."""
    attention = trainer.model_parts[0].layers[_LAYER].attention
    inner = attention.inner_attention
    forward = inner.forward

    def unscaled(q: torch.Tensor, *others: Any, **options: Any) -> Any:
        # q is [batch, position, head, head_dim].
        factor = torch.ones(q.shape[2], 1, dtype=q.dtype, device=q.device)
        factor[0] = attention.head_dim**0.5
        return forward(q * factor, *others, **options)

    inner.forward = unscaled


def one_layer_stale(trainer: Any) -> None:
    """One layer computes with its weights of one step ago; its updates are applied to the new ones.

    As if its all-gather did not wait for the optimizer. For sets without gradient accumulation.
    """
    layer = trainer.model_parts[0].layers[_LAYER]
    forward_backward = trainer.forward_backward_step
    before: list[torch.Tensor] = []

    def with_old(*arguments: Any, **options: Any) -> Any:
        newest = [shard.clone() for shard in _shards(layer)]
        _fill(_shards(layer), before or newest)
        result = forward_backward(*arguments, **options)
        _fill(_shards(layer), newest)
        before[:] = newest
        return result

    trainer.forward_backward_step = with_old


def _shards(module: Any) -> list[torch.Tensor]:
    """The parameters' local shards, which share memory with them."""
    return [
        parameter.to_local().detach() if hasattr(parameter, "to_local") else parameter.detach()
        for parameter in module.parameters()
    ]


@torch.no_grad()
def _fill(shards: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for shard, value in zip(shards, values, strict=True):
        shard.copy_(value)
