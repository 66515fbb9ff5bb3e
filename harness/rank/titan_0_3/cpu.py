"""What torchtitan 0.3 itself assumes of a GPU, beyond ``harness.rank.cpu``; after its import."""

from __future__ import annotations

import types


def prepare_torchtitan() -> None:
    build_masks_eagerly()
    end_without_sleeping()


def build_masks_eagerly() -> None:
    """Two modules compile ``create_block_mask``; on a CPU that costs seconds and saves nothing."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = create_block_mask
    ring._compiled_create_block_mask = create_block_mask


def end_without_sleeping() -> None:
    """``Trainer.train`` ends with two seconds of sleep on rank 0 so that other ranks finish.

    Here all ranks meet in a barrier instead (``training.run``), so the sleep would only make
    every job two seconds longer.
    """
    from torchtitan import trainer

    trainer.time = types.SimpleNamespace(
        perf_counter=trainer.time.perf_counter, sleep=lambda _seconds: None
    )
