"""Frozen steps: forward and backward passes at the initial weights (``titan.common.frozen_steps``).

What a pass changes (gradients, the stream's place) is put back, so training goes on as if there had
been none. Dropout is refused, so no random numbers are drawn.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.silenced import silenced


def make_frozen_steps(trainer: MegatronTrainer, count: int, recorder: StepRecorder) -> None:
    """Steps of the trainer itself, injected code included, that update nothing.

    One more than ``count``: the first batch comes twice. Collective over the world.
    """
    if not count:
        return
    start = trainer.stream.consumed
    with _without_updates(trainer):
        for number in range(count + 1):
            if number == count:
                _rewind(trainer, start)
            recorder.begin_frozen()
            trainer.train_step()
            recorder.end_frozen()
    _rewind(trainer, start)
    recorder.close_frozen()


def _rewind(trainer: MegatronTrainer, consumed: int) -> None:
    trainer.stream.consumed = consumed
    trainer.batches = iter(trainer.stream)


def _without_updates(trainer: MegatronTrainer) -> AbstractContextManager[None]:
    """No update of weights, optimizer states or learning rate, and nothing is logged."""
    return silenced(
        *((each, "step_with_ready_grads", True) for each in trainer.optimizer.chained_optimizers),
        (trainer.schedule, "step", None),
        (trainer, "log", None),
    )
