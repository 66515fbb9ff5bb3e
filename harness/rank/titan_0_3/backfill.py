"""torch APIs newer than 2.13 that torchtitan 0.3 calls, written in terms of torch 2.13's own.

torchtitan 0.3 was validated with torch 2.14; each function here does nothing where torch has the
API itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


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
