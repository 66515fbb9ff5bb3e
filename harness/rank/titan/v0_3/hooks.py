"""Where the recorder touches a built trainer of torchtitan 0.3 or its main branch.

Every hook wraps what was there and is put on the instance (or, for the one free function, on its
module), before ``inject``: an injected wrapper lies outside and its effects are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torchtitan
import torchtitan.trainer as trainer_module
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common.attention import FusedQKVLinear

from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.rows import Fused
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView, rate_of
from converge_harness.rank.settings import KeyProblem, SettingError
from converge_harness.rank.titan.common.checkpoints import stateful_parts, watch_checkpoints
from converge_harness.rank.titan.common.clipping import watch_clipping
from converge_harness.rank.titan.common.frozen_steps import add_frozen_steps
from converge_harness.rank.titan.common.pipelining import ignore_shape_inference, watch_microbatches
from converge_harness.rank.titan.v0_3.series import CUDA_GRAPHS, SERIES, as_samples
from converge_harness.run_folder.job import RankJob


def attach(
    trainer: Any, job: RankJob, after_first_step: Callable[[StepRecorder], None]
) -> StepRecorder:
    """Put a recorder on a built trainer. Collective over the world.

    ``after_first_step`` is called on every rank when the first step's evidence is complete.
    """
    recorder = StepRecorder(_view(trainer), job)
    _watch_loss(trainer, recorder)
    _watch_forward_backward(trainer, recorder)
    if trainer.parallel_dims.pp_enabled:
        ignore_shape_inference(trainer.pp_schedule, recorder)
        watch_microbatches(trainer, recorder)
    watch_clipping(distributed_utils, trainer_module, recorder)
    _watch_metrics(trainer, recorder)
    _watch_steps(trainer, recorder, lambda: after_first_step(recorder))
    graphs = CUDA_GRAPHS and not trainer.config.training.disable_cuda_graphs
    add_frozen_steps(trainer, job, recorder, keeps_gradients=graphs)
    if job.resumes:
        watch_checkpoints(trainer, job, recorder)
    return recorder


def _view(trainer: Any) -> TrainerView:
    dims = trainer.parallel_dims
    tp = dims.get_optional_mesh("tp")
    batch = dims.get_optional_mesh("batch")
    tp_rank = tp.get_local_rank() if tp is not None else 0
    others = [dims.get_optional_mesh(name) for name in ("cp", "pp")]
    return TrainerView(
        model_parts=tuple(trainer.model_parts),
        dp_rank=batch.get_local_rank() if batch is not None else 0,
        first_of_dp=tp_rank == 0
        and all(mesh is None or mesh.get_local_rank() == 0 for mesh in others),
        has_last_stage=not dims.pp_enabled or trainer.pp_has_last_stage,
        tp_rank=tp_rank,
        tp_group=tp.get_group() if tp is not None else None,
        vocab_size=trainer.model_config.vocab_size,
        device=trainer.device,
        optimizers=tuple(trainer.optimizers),
        learning_rate=lambda: rate_of(trainer.optimizers),
        stateful=lambda: stateful_parts(trainer),
        fused=dict(_fused(trainer.model_parts)),
        versions={"torch": torch.__version__, "torchtitan": torchtitan.__version__},
    )


def _fused(parts: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Fused]]:
    """Queries, keys and values in one matrix, head by head, under the checkpoint's own names."""
    for part in parts:
        for prefix, module in part.named_modules():
            if not isinstance(module, FusedQKVLinear):
                continue
            pattern = (0,) * module.heads_per_kv + (1, 2)
            for kind, _ in module.wqkv.named_parameters():
                names = tuple(canonical(f"{prefix}.{each}.{kind}") for each in ("wq", "wk", "wv"))
                yield (
                    canonical(f"{prefix}.wqkv.{kind}"),
                    Fused(names, module.head_dim, pattern),
                )


def _watch_loss(trainer: Any, recorder: StepRecorder) -> None:
    """Look at logits and labels just outside the loss function, which may be compiled.

    Chunked loss calls the inner function once per chunk, a pipeline once per microbatch on its
    last stage. A loss may call its function several times for one batch, as DeepSeek's prediction
    of later tokens: the first call is that of the next token, and the only one that is looked at.

    Raises SettingError for a loss that has no function to look at.
    """
    loss = trainer.loss_fn
    if isinstance(loss, ChunkedLossWrapper):
        loss = loss.loss_fn
    compute = getattr(loss, "fn", None)
    if compute is None:
        raise SettingError(
            KeyProblem(
                "converge.config",
                f"its loss {type(loss).__name__} has no fn, the function of logits and labels that "
                "torchtitan's losses call: set self.fn in your loss, and call that",
            )
        )
    is_first = True

    class Watched(type(loss)):  # type: ignore[misc]  # its calls are looked up on its class
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            is_first = True
            return super().__call__(*args, **kwargs)

    def watched(pred: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        nonlocal is_first
        if is_first:
            recorder.on_logits(pred, labels)
        is_first = False
        return compute(pred, labels, **kwargs)

    loss.__class__ = Watched
    loss.fn = watched


def _watch_forward_backward(trainer: Any, recorder: StepRecorder) -> None:
    """Frame the part of a microbatch that torchtitan may put into a CUDA graph; none in a pipeline.

    The first call runs it as it is, the second captures it, and that and all later ones replay it.
    """
    name = "fwd_bwd_fn" if CUDA_GRAPHS else "forward_backward_step"
    if not CUDA_GRAPHS and trainer.parallel_dims.pp_enabled:
        return
    forward_backward = getattr(trainer, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with recorder.forward_backward():
            return forward_backward(*args, **kwargs)

    setattr(trainer, name, watched)


def _watch_metrics(trainer: Any, recorder: StepRecorder) -> None:
    """The floats that torchtitan is about to round for its console and TensorBoard."""
    metrics = trainer.metrics_processor
    log = metrics.log

    def watched(step: int, loss: float, max_loss: float, grad_norm: float, **kwargs: Any) -> None:
        recorder.on_log(loss, grad_norm)
        log(step, loss, max_loss, grad_norm, **kwargs)

    metrics.log = watched


def _watch_steps(
    trainer: Any, recorder: StepRecorder, after_first_step: Callable[[], None]
) -> None:
    """Frame every step, and look at the batches that it really takes."""
    train_step = trainer.train_step
    first = True

    def watched(batches: Iterator[Any]) -> None:
        nonlocal first
        if recorder.is_frozen:
            train_step(_watch_batches(batches, trainer, recorder))
            return
        recorder.begin_step(trainer.step)
        try:
            train_step(_watch_batches(batches, trainer, recorder))
        except RuntimeError as error:
            reported = SERIES.not_finite.search(str(error))
            if reported is None:
                raise
            # torchtitan stops before it logs. All ranks of the last pipeline stage come here and
            # all others do, too, or return normally, so everyone takes part in ending the step.
            recorder.on_log(float(reported[1]) if reported[1] else None, None)
            recorder.end_step()
            raise
        recorder.end_step()
        if first:
            first = False
            after_first_step()

    trainer.train_step = watched


def _watch_batches(batches: Iterator[Any], trainer: Any, recorder: StepRecorder) -> Iterator[Any]:
    training = trainer.config.training
    for inputs, labels in batches:
        recorder.on_batch(as_samples(inputs["input"], training), as_samples(labels, training))
        yield inputs, labels
