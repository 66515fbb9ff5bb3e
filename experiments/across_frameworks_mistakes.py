"""Wrong conversions of torchtitan's weights to Megatron-Core: see the file of the same name.

Each gives the weights of an already converted model another order of rows: that which a converter
with the mistake would have written. They are for ranks that hold whole weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from across_frameworks_options import decay_norms


def rows_as_in_torchtitan(trainer: Any) -> None:
    """Queries and keys as torchtitan has them, for a model that rotates halves of a head."""
    for attention in _attentions(trainer):
        heads = _heads(attention)
        halves = heads[:, :-1].unflatten(2, (2, -1))  # all but the values
        heads[:, :-1] = halves.transpose(2, 3).flatten(2, 3)
        attention.linear_qkv.weight.data.copy_(heads.flatten(0, 2))
    decay_norms(trainer)


def all_queries_first(trainer: Any) -> None:
    """Queries, keys and values one after the other, and not group by group."""
    for attention in _attentions(trainer):
        heads = _heads(attention)
        parts = (heads[:, :-2], heads[:, -2], heads[:, -1])
        rows = [part.reshape(-1, heads.shape[-1]) for part in parts]
        attention.linear_qkv.weight.data.copy_(torch.cat(rows))
    decay_norms(trainer)


def gate_after_up(trainer: Any) -> None:
    """The two matrices of a gated feed-forward layer in the other order."""
    for layer in _layers(trainer):
        weight = layer.mlp.linear_fc1.weight.data
        weight.copy_(torch.cat(weight.chunk(2)[::-1]))
    decay_norms(trainer)


def _layers(trainer: Any) -> Iterator[Any]:
    for part in trainer.parts:
        yield from part.module.decoder.layers


def _attentions(trainer: Any) -> Iterator[Any]:
    return (layer.self_attention for layer in _layers(trainer))


def _heads(attention: Any) -> torch.Tensor:
    """A copy of the weight, shape (groups, queries of a group and its key and value, rows, …)."""
    config = attention.config
    return attention.linear_qkv.weight.data.clone().unflatten(
        0, (config.num_query_groups, -1, config.kv_channels)
    )
