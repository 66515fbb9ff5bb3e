"""Where the recorder touches a trainer.

Every hook wraps what was there and is put on the instance, before ``inject``: an injected wrapper
lies outside and its effects are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state

from converge_harness.rank.data_order import Sample
from converge_harness.rank.megatron.parameters import (
    CanonicalPart,
    Trained,
    feed_forwards,
    fused_of,
    module_names,
)
from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.recorder.cross_entropy import IGNORE_INDEX
from converge_harness.rank.recorder.fetched_shard import FetchedStates
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView
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
    recorder = StepRecorder(_view(trainer, parts, trained, device), job)
    _watch_batches(trainer, recorder)
    _watch_clipping(trainer, recorder)
    _watch_log(trainer, recorder)
    _watch_steps(trainer, recorder, lambda: after_first_step(recorder))
    return recorder


def _view(
    trainer: MegatronTrainer,
    parts: tuple[CanonicalPart, ...],
    trained: Trained,
    device: torch.device,
) -> TrainerView:
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return TrainerView(
        model_parts=parts,
        dp_rank=parallel_state.get_data_parallel_rank(),
        first_of_dp=tp_rank == 0 and parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        has_last_stage=trainer.has_last_stage,
        tp_rank=tp_rank,
        tp_group=parallel_state.get_tensor_model_parallel_group() if is_parallel else None,
        vocab_size=trainer.config.tables.gpt.vocab_size,
        device=device,
        optimizers=(FetchedStates(shard for _, shard in trained.shards),),
        learning_rate=lambda: float(trainer.optimizer.param_groups[0]["lr"]),
        parameters=trained.shards,
        copies=trained.copies,
        fused=fused_of(parts),
        pieces=_pieces_of(parts),
        module_names=module_names(parts),
        versions={"torch": torch.__version__, "megatron-core": megatron.core.__version__},
    )


def _pieces_of(parts: tuple[CanonicalPart, ...]) -> dict[str, int]:
    """Gated feed-forward layers: a rank has its part of the gate, then that of the other matrix.

    No other trainer has such a module, so they have their own names.
    """
    return {
        f"{name}.linear_fc1": 2
        for part in parts
        for number, layer in part.layers.items()
        if layer.config.gated_linear_unit
        for name, _ in feed_forwards(number, layer)
    }


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
        if part.module.post_process:
            _watch_logits(part.module, recorder, latest)


def _watch_logits(gpt: Any, recorder: StepRecorder, latest: list[Sample]) -> None:
    compute = gpt.compute_language_model_loss

    def watched(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        counted = labels.where(latest[0].labels != IGNORE_INDEX, IGNORE_INDEX)
        recorder.on_logits(logits.transpose(0, 1), counted)  # they are sequence first
        found: torch.Tensor = compute(labels, logits)
        return found

    gpt.compute_language_model_loss = watched


def _watch_clipping(trainer: MegatronTrainer, recorder: StepRecorder) -> None:
    """Gradients are complete when the optimizer is called, which clips them in place."""
    step = trainer.optimizer.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        recorder.before_clip()
        return step(*args, **kwargs)

    trainer.optimizer.step = watched


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
