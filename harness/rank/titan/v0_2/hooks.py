"""Where the recorder sits in a torchtitan 0.2 trainer.

Everything is wrapped on the trainer object, and so before an ``inject`` wraps it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import torchtitan.distributed.utils as dist_utils
import torchtitan.train as trainer_module

from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView, rate_of
from converge_harness.rank.titan.common.checkpoints import stateful_parts, watch_checkpoints
from converge_harness.rank.titan.common.clipping import watch_clipping
from converge_harness.rank.titan.common.frozen_steps import add_frozen_steps
from converge_harness.rank.titan.common.pipelining import (
    ignore_shape_inference,
    watch_microbatches,
)
from converge_harness.run_folder.job import RankJob


def view(trainer: Any) -> TrainerView:
    """Where things are in a built trainer."""
    dims = trainer.parallel_dims
    rank_on = {name: _rank_on(dims, name) for name in ("batch", "cp", "tp", "pp")}
    tp_mesh = dims.get_optional_mesh("tp")
    return TrainerView(
        model_parts=tuple(trainer.model_parts),
        dp_rank=rank_on["batch"],
        first_of_dp=rank_on["cp"] == rank_on["tp"] == rank_on["pp"] == 0,
        has_last_stage=not dims.pp_enabled or trainer.pp_has_last_stage,
        tp_rank=rank_on["tp"],
        tp_group=None if tp_mesh is None else tp_mesh.get_group(),
        vocab_size=trainer.model_args.vocab_size,
        device=trainer.device,
        optimizers=tuple(trainer.optimizers),
        learning_rate=lambda: rate_of(trainer.optimizers),
        stateful=lambda: stateful_parts(trainer),
        versions={"torch": torch.__version__, "torchtitan": version("torchtitan")},
    )


def attach(
    trainer: Any, job: RankJob, after_first_step: Callable[[StepRecorder], None]
) -> StepRecorder:
    """Put a recorder into a built trainer. Collective over the world.

    ``after_first_step`` is called on every rank when the first step's evidence is complete.
    """
    recorder = StepRecorder(view(trainer), job)
    trainer.batch_generator = _watch_batches(trainer.batch_generator, recorder)
    _watch_loss(trainer, recorder)
    if trainer.parallel_dims.pp_enabled:
        ignore_shape_inference(trainer.pp_schedule, recorder)
        watch_microbatches(trainer, recorder)
    watch_clipping(dist_utils, trainer_module, recorder)
    trainer.metrics_processor.log = _watch_log(trainer.metrics_processor.log, recorder)
    trainer.train_step = _watch_step(trainer, recorder, lambda: after_first_step(recorder))
    add_frozen_steps(trainer, job, recorder)
    if job.resumes:
        watch_checkpoints(trainer, job, recorder)
    return recorder


def _watch_batches(batches: Callable[..., Any], recorder: StepRecorder) -> Callable[..., Any]:
    @functools.wraps(batches)
    def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for inputs, labels in batches(*args, **kwargs):
            recorder.on_batch(inputs["input"], labels)
            yield inputs, labels

    return watched


def _watch_loss(trainer: Any, recorder: StepRecorder) -> None:
    """Show the recorder logits and labels wherever the loss is called; outside what is compiled.

    A pipeline schedule also calls its loss function on made-up tensors, to learn the shapes of
    gradients, before the first microbatch; ``_compute_loss`` is called for real ones only.
    """
    owner, name = (
        (trainer.pp_schedule, "_compute_loss")
        if trainer.parallel_dims.pp_enabled
        else (trainer, "loss_fn")
    )
    loss = getattr(owner, name)

    def watched(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.on_logits(logits, labels)
        return loss(logits, labels, *args, **kwargs)

    setattr(owner, name, watched)


def _watch_log(log: Callable[..., Any], recorder: StepRecorder) -> Callable[..., Any]:
    @functools.wraps(log)
    def watched(
        step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any
    ) -> Any:
        recorder.on_log(float(global_avg_loss), float(grad_norm))
        return log(step, global_avg_loss, global_max_loss, grad_norm, **more)

    return watched


def _watch_step(
    trainer: Any, recorder: StepRecorder, after_first_step: Callable[[], None]
) -> Callable[..., Any]:
    train_step = trainer.train_step

    @functools.wraps(train_step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if recorder.is_frozen:
            return train_step(*args, **kwargs)
        first = recorder.step == 0
        recorder.begin_step(trainer.step)
        result = train_step(*args, **kwargs)
        recorder.end_step()
        if first:
            after_first_step()
        return result

    return watched


def _rank_on(dims: Any, name: str) -> int:
    mesh = dims.get_optional_mesh(name)
    return 0 if mesh is None else mesh.get_local_rank()
