"""Where the recorder touches a trainer.

Every hook wraps what was there and is put on the instance, before ``inject``: an injected wrapper
lies outside and its effects are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from converge_harness.rank.data_order import Sample
from converge_harness.rank.megatron.parameters import CanonicalPart, Trained
from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.megatron.view import (
    view_of,
    watch_clipping,
    watch_logits,
    without_wrappers,
)
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.run_folder.job import RankJob


def attach(
    trainer: MegatronTrainer,
    job: RankJob,
    parts: tuple[CanonicalPart, ...],
    trained: Trained,
    device: torch.device,
    after_first_step: Callable[[StepRecorder], None],
) -> StepRecorder:
    """Put a recorder on a trainer. Collective over the world.

    ``after_first_step`` is called on every rank when the first step's evidence is complete.
    """
    vocab_size = trainer.config.tables.gpt.vocab_size
    view = view_of(parts, trained, trainer.optimizer, vocab_size, device)
    recorder = StepRecorder(view, job)
    _watch_batches(trainer, recorder)
    watch_clipping(trainer.optimizer, recorder)
    _watch_log(trainer, recorder)
    _watch_steps(trainer, recorder, lambda: after_first_step(recorder))
    return recorder


def _watch_batches(trainer: MegatronTrainer, recorder: StepRecorder) -> None:
    """Look at the microbatches that the schedule hands to this rank's first chunk, and at logits.

    The labels of the latest forward step are those of the logits that its chunk computes.
    """
    forward_step = trainer.forward_step
    latest: list[Sample] = []

    def seen(batches: Iterator[Sample], part: Any) -> Iterator[Sample]:
        for sample in batches:
            latest[:] = [sample]
            recorder.on_microbatch(sample.inputs)
            if part is trainer.parts[0]:
                recorder.on_batch(sample.inputs, sample.labels)
            yield sample

    def watched(batches: Iterator[Sample], part: Any) -> Any:
        return forward_step(seen(batches, part), part)

    trainer.forward_step = watched  # type: ignore[method-assign]
    for part in trainer.parts:
        gpt = without_wrappers(part)
        if gpt.post_process:
            watch_logits(
                gpt,
                recorder,
                lambda labels: labels.where(latest[0].labels != IGNORE_INDEX, IGNORE_INDEX),
            )


def _watch_log(trainer: MegatronTrainer, recorder: StepRecorder) -> None:
    log = trainer.log

    def watched(loss: float | None, grad_norm: float | None) -> None:
        recorder.on_log(loss, grad_norm)
        log(loss, grad_norm)

    trainer.log = watched  # type: ignore[method-assign]


def _watch_steps(
    trainer: MegatronTrainer, recorder: StepRecorder, after_first_step: Callable[[], None]
) -> None:
    train_step = trainer.train_step

    def watched() -> None:
        if recorder.is_frozen:
            train_step()
            return
        recorder.begin_step(trainer.step + 1)
        train_step()
        recorder.end_step()
        if trainer.step == 0:
            after_first_step()

    trainer.train_step = watched  # type: ignore[method-assign]
