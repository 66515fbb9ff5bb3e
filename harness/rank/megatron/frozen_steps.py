"""Frozen steps: forward and backward passes at the initial weights (``titan.common.frozen_steps``).

What a pass changes (gradients, the stream's place) is put back, so training goes on as if there had
been none. Dropout is refused, so no random numbers are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.recorder.step_recorder import StepRecorder


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


@contextmanager
def _without_updates(trainer: MegatronTrainer) -> Iterator[None]:
    """No update of weights, optimizer states or learning rate, and nothing is logged."""
    silenced = (
        *((each, "step_with_ready_grads", True) for each in trainer.optimizer.chained_optimizers),
        (trainer.schedule, "step", None),
        (trainer, "log", None),
    )
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in silenced]
    for owner, name, answer in silenced:
        setattr(owner, name, lambda *_, answer=answer, **__: answer)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
