"""Faults in the middle of a training step: a rank dies, hangs, or computes NaN.

A rank dies or hangs once the backward of the step's first microbatch (all of them, in a pipeline)
has returned: others may wait for it in a collective, and no parameter of this rank has been
updated in the step.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from harness.rank.pipelining import stages


def die_after_backward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """SIGKILL of this rank."""

    def die() -> None:
        record()
        os.kill(os.getpid(), signal.SIGKILL)

    _after_backward(trainer, step, die)


def hang_after_backward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """This rank stops answering, for ever. SIGTERM and SIGKILL still end it."""

    def hang() -> None:
        record()
        while True:
            time.sleep(60)

    _after_backward(trainer, step, hang)


def poison_forward(trainer: Any, step: int, record: Callable[[], None]) -> None:
    """The step's first forward on this rank gives NaN, whichever pipeline stage it runs."""
    poisoned = False

    def poison(output: torch.Tensor) -> torch.Tensor:
        nonlocal poisoned
        if poisoned or trainer.step != step or not torch.is_grad_enabled():
            return output
        poisoned = True
        record()
        return output * math.nan

    if not trainer.parallel_dims.pp_enabled:
        trainer.model_parts[0].register_forward_hook(lambda _module, _inputs, out: poison(out))
        return
    for stage in stages(trainer.pp_schedule):
        # Not a hook of the module: that would also see the forward by which torch learns shapes.
        forward = stage.forward_maybe_with_nosync
        stage.forward_maybe_with_nosync = _followed_by(forward, poison)


def _followed_by(
    forward: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    return changed


def _after_backward(trainer: Any, step: int, strike: Callable[[], None]) -> None:
    """Call ``strike``, which never returns, in the middle of a step."""
    forward_backward = trainer.forward_backward_step

    @functools.wraps(forward_backward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        loss = forward_backward(*args, **kwargs)
        if trainer.step == step:
            strike()
        return loss

    trainer.forward_backward_step = watched
