"""What torchtitan 0.3 itself assumes of a GPU, beyond ``harness.rank.cpu``; after its import."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch


def prepare_torchtitan() -> None:
    build_masks_eagerly()
    exchange_uneven_parts()
    end_without_sleeping()


def build_masks_eagerly() -> None:
    """Two modules compile ``create_block_mask``; on a CPU that costs seconds and saves nothing."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = create_block_mask
    ring._compiled_create_block_mask = create_block_mask


def exchange_uneven_parts() -> None:
    """Let ``all_to_all`` take lists of tensors of different sizes, as NCCL does.

    Experts get their tokens so by ``spmd_types``. gloo wants one size for all in a list, and takes
    any in one tensor with split sizes.
    """
    import torch.distributed as dist

    def all_to_all(
        outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any = None
    ) -> None:
        sent = torch.cat([part.reshape(-1) for part in inputs])
        sizes = [part.numel() for part in outputs]
        received = sent.new_empty(sum(sizes))
        own = [part.numel() for part in inputs]
        dist.all_to_all_single(received, sent, sizes, own, group=group)
        for part, values in zip(outputs, received.split(sizes), strict=True):
            part.copy_(values.view_as(part))

    dist.all_to_all = all_to_all


def end_without_sleeping() -> None:
    """``Trainer.train`` ends with two seconds of sleep on rank 0 so that other ranks finish.

    Here all ranks meet in a barrier instead (``training.run``), so the sleep would only make
    every job two seconds longer.
    """
    from torchtitan import trainer

    trainer.time = types.SimpleNamespace(
        perf_counter=trainer.time.perf_counter, sleep=lambda _seconds: None
    )
