"""C1: gradients of the right direction and the wrong length."""

from __future__ import annotations

from typing import Any

from places import before_clipping, scale_gradients


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
