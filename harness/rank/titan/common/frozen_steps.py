"""Frozen steps: forward and backward passes at the initial weights, before training begins.

Two correct runs diverge after their first update, so later differences are drift as much as error.
At frozen weights nothing drifts: every batch repeats the comparison of the first step, on other
samples. No optimizer steps, and all that a pass changes (gradients, buffers, random numbers, the
loader's place, counters, weights that something else than an optimizer moves) is put back, so that
training goes on as if there had been none.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from converge_harness.rank.recorder.placement import local_shard
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.silenced import silenced
from converge_harness.run_folder.job import RankJob


def add_frozen_steps(
    trainer: Any, job: RankJob, recorder: StepRecorder, *, keeps_gradients: bool = False
) -> None:
    """Have a torchtitan trainer make the job's frozen steps when it is about to train.

    Only a fresh start makes them: a run that resumes is at other weights.

    With ``keeps_gradients`` they are set to zero where they are, as the trainer does in training
    whose CUDA graph writes to the same memory in every replay.
    """
    continues = trainer.should_continue_training
    began = False

    def watched_continues() -> bool:
        nonlocal began
        if not began:
            began = True
            if job.frozen and trainer.step == 0:
                _make(trainer, job.frozen, recorder, keeps_gradients=keeps_gradients)
        return continues()

    trainer.should_continue_training = watched_continues


def _make(trainer: Any, count: int, recorder: StepRecorder, *, keeps_gradients: bool) -> None:
    """Train steps of the trainer itself, as it is by now, that update nothing.

    One more than ``count``: the first batch comes twice. A run whose two passes over it differ
    draws random numbers (dropout, stochastic rounding), and this says how far they move gradients.
    """
    weights = _shards(trainer)
    # In the memory of the host: a second copy of the weights may not fit beside the first.
    initial = [shard.to("cpu", copy=True) for shard in weights]
    clear = functools.partial(_clear_gradients, trainer, keeps_gradients=keeps_gradients)
    with _put_back(trainer, recorder, clear) as start, _without_updates(trainer):
        trainer.step = 1  # what depends on the step sees the first one
        batches = trainer.batch_generator(trainer.dataloader)
        for number in range(count + 1):
            if number == count:  # the first batch once more, with the random numbers that come next
                trainer.dataloader.load_state_dict(start)
                batches = trainer.batch_generator(trainer.dataloader)
            clear()
            recorder.begin_frozen()
            trainer.train_step(batches)
            recorder.end_frozen()
            # A trainer that decays or clips weights by itself does so before the optimizer's step.
            with torch.no_grad():
                for shard, value in zip(weights, initial, strict=True):
                    shard.copy_(value)
    recorder.close_frozen()


def _shards(trainer: Any) -> list[torch.Tensor]:
    """This rank's part of every weight."""
    return [local_shard(weight) for part in trainer.model_parts for weight in part.parameters()]


def _without_updates(trainer: Any) -> AbstractContextManager[None]:
    """No update of weights, optimizer state or learning rate, and nothing is logged."""
    return silenced(
        (trainer.optimizers, "step", None),
        (trainer.lr_schedulers, "step", None),
        (trainer.metrics_processor, "should_log", False),
        (trainer.metrics_processor, "log", None),
    )


@contextmanager
def _put_back(
    trainer: Any, recorder: StepRecorder, clear_gradients: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Restore what forward and backward passes change, weights aside.

    Gives the loader's state, from which it goes on in the end.
    """
    loader = trainer.dataloader.state_dict()
    buffers = [
        (buffer, buffer.detach().clone())
        for part in trainer.model_parts
        for buffer in part.buffers()
    ]
    processor = trainer.metrics_processor
    counted = trainer.ntokens_seen, processor.ntokens_since_last_log
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    drawn_from = recorder.random.copies()
    on_gpu = torch.cuda.get_rng_state_all() if trainer.device.type == "cuda" else None
    step = trainer.step
    try:
        yield loader
    finally:
        trainer.step = step
        clear_gradients()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        trainer.ntokens_seen, processor.ntokens_since_last_log = counted
        processor.data_loading_times.clear()
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 (libraries still use it)
        if on_gpu is not None:
            torch.cuda.set_rng_state_all(on_gpu)
        recorder.random.put_back(drawn_from)
        trainer.dataloader.load_state_dict(loader)


def _clear_gradients(trainer: Any, *, keeps_gradients: bool) -> None:
    """As before the first step, whatever the optimizer knows of: each frozen step is a first one.

    A trainer clears gradients by its optimizers, and a parameter that a bug keeps from them would
    bring those of all frozen steps into training.
    """
    for part in trainer.model_parts:
        part.zero_grad(set_to_none=not keeps_gradients)
