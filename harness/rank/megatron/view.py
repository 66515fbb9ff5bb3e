"""What the recorder needs of a model that Megatron-Core trains, whoever calls it.

``trainer.py`` is our own loop, ``converge_harness.probe.megatron_loop`` watches Megatron-LM's.
Every hook wraps what was there and is put on the instance, so it ends with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state

from converge_harness.rank.megatron.parameters import (
    CanonicalPart,
    Trained,
    feed_forwards,
    fused_of,
    module_names,
)
from converge_harness.rank.recorder.fetched_shard import FetchedStates
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.recorder.trainer_view import TrainerView


def view_of(
    parts: Sequence[CanonicalPart],
    trained: Trained,
    optimizer: Any,
    vocab_size: int,
    device: torch.device,
    *,
    reads_batches: bool = True,
    logits_optional: bool = False,
) -> TrainerView:
    """This rank's part of a model, and its place among the ranks.

    Args:
        parts: the model chunks of this rank.
        trained: what its optimizers update.
        optimizer: a ``ChainedOptimizer`` of ``get_megatron_optimizer``.
        vocab_size: rows of the whole output layer.
        device: where this rank computes.
        reads_batches: as in ``TrainerView``.
        logits_optional: as in ``TrainerView``.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    return TrainerView(
        model_parts=tuple(parts),
        dp_rank=parallel_state.get_data_parallel_rank(),
        first_of_dp=tp_rank == 0 and parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        has_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        tp_rank=tp_rank,
        tp_group=parallel_state.get_tensor_model_parallel_group() if is_parallel else None,
        vocab_size=vocab_size,
        device=device,
        optimizers=(FetchedStates(shard for _, shard in trained.shards),),
        learning_rate=lambda: float(optimizer.param_groups[0]["lr"]),
        parameters=trained.shards,
        copies=trained.copies,
        fused=fused_of(parts),
        pieces=_pieces_of(parts),
        module_names=module_names(parts),
        versions={"torch": torch.__version__, "megatron-core": _version()},
        reads_batches=reads_batches,
        logits_optional=logits_optional,
    )


def _version() -> str:
    """Of the distribution that is imported; of a checkout on the path, what it says itself.

    Since 0.18 ``megatron.core.__version__`` ends with the commit of the git checkout in which the
    package lies, whose ever that is.
    """
    for installed in metadata.distributions(name="megatron-core"):
        place = installed.locate_file("megatron/core/__init__.py")
        if os.path.realpath(str(place)) == os.path.realpath(str(megatron.core.__file__)):
            return installed.version
    return str(megatron.core.__version__)


def _pieces_of(parts: Sequence[CanonicalPart]) -> dict[str, int]:
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


def without_wrappers(chunk: Any) -> Any:
    """The ``GPTModel`` in DDP or the two of Megatron-FSDP, and in ``Float16Module``."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def watch_logits(
    gpt: Any, recorder: StepRecorder, counted: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Look at the logits of a ``GPTModel`` that has the output layer.

    ``counted`` gives the labels of the latest microbatch, with those that do not count as
    ``IGNORE_INDEX``; None if that is not known.
    """
    compute = gpt.compute_language_model_loss

    def watched(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen = counted(labels)
        if seen is not None:
            recorder.on_logits(logits.transpose(0, 1), seen)  # they are sequence first
        found: torch.Tensor = compute(labels, logits)
        return found

    gpt.compute_language_model_loss = watched


def watch_clipping(optimizer: Any, recorder: StepRecorder) -> None:
    """Gradients are complete when the optimizer is called, which clips them in place."""
    step = optimizer.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        recorder.before_clip()
        return step(*args, **kwargs)

    optimizer.step = watched
