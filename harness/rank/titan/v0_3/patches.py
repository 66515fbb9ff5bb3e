"""What torchtitan 0.3 needs of torch, and assumes of a GPU, that is not there.

``complete_torch``, before torchtitan's import: torch APIs newer than 2.13 that it calls, written in
terms of torch 2.13's own. torchtitan 0.3 was validated with torch 2.14; each of these functions
does nothing where torch has the API itself. ``prepare_torchtitan``, after its import: what it
assumes of a GPU beyond ``converge_harness.rank.titan.common.cpu``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def unknown_autotune_keys_ignored() -> Iterator[None]:
    """Let torchao 0.18 be imported beside triton 3.9, which it cannot be on a GPU.

    ``torchao.prototype.moe_training.kernels.float8_rowwise`` tunes by a key, ``num_elements``, that
    is no argument of its kernel. triton 3.9 refuses that while the module is imported, and
    torchtitan 0.3 imports it, with or without Float8. Older ones ignored such a key. Fixed after
    torchao's release, by its pull request 4880.
    """
    try:
        import triton
    except ImportError:
        yield
        return
    autotune = triton.autotune

    def autotune_by_arguments(configs: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        def decorate(kernel: Any) -> Any:
            known = [name for name in key if name in kernel.arg_names]
            return autotune(configs, known, *args, **kwargs)(kernel)

        return decorate

    triton.autotune = autotune_by_arguments
    try:
        yield
    finally:
        triton.autotune = autotune


def complete_torch() -> None:
    add_set_timeout()
    add_microbatch_arguments()


def add_set_timeout() -> None:
    """``torch.distributed.set_timeout(timeout, group)``: public since 2.14, private before."""
    if hasattr(dist, "set_timeout"):
        return
    from torch.distributed.distributed_c10d import _set_pg_timeout

    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        _set_pg_timeout(timeout, group)

    dist.set_timeout = set_timeout


def add_microbatch_arguments() -> None:
    """``PipelineSchedule.step(arg_mbs=, kwarg_mbs=, target_mbs=)``: microbatches already split.

    torch 2.13 knows whole batches only, which it splits itself. Its ``step`` prepares the stages
    and hands split microbatches to ``_step_microbatches``; so does this one, without the split.
    """
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
    )

    for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(schedule.step).parameters:
            schedule.step = _step_taking_microbatches(schedule.step)


def _step_taking_microbatches(whole_batch_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(
        self: Any,
        *args: Any,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        if arg_mbs is None and kwarg_mbs is None:
            return whole_batch_step(
                self,
                *args,
                losses=losses,
                loss_kwargs=loss_kwargs,
                return_outputs=return_outputs,
                **kwargs,
            )
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        count = self._n_microbatches
        self._step_microbatches(
            arg_mbs or [()] * count,
            kwarg_mbs or [{}] * count,
            target_mbs,
            losses,
            return_outputs,
            loss_kwargs=loss_kwargs,
        )
        return None

    return step


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
