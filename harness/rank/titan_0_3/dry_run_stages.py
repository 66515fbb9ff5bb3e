"""The pipeline stages that a dry run's rank would hear from, and what they would say.

Before the first step, stages tell each other the shapes of what they will send. On a fake process
group nobody answers, so this module does: all stages of a decoder pass on hidden states of one
shape, and the gradient of an output has the output's shape.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.pipelining._utils import (
    InferenceMode,
    _StageBackwardMeta,
    _StageForwardMeta,
    extract_tensor_meta,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.config import TORCH_DTYPE_MAP

_DYNAMIC = types.SimpleNamespace(item=lambda: 0)
"""The vote of a stage that wants to be told shapes."""


class Neighbours:
    """Answers for the other stages of a built trainer's pipeline."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        if not trainer.parallel_dims.pp_enabled:
            self.stages: tuple[int, ...] = (0,)
            return
        schedule = trainer.pp_schedule
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self.stages = tuple(stage.stage_index for stage in stages)
        # torch 2.15 decides for all stages at once, and refuses a fake group; before, each voted.
        schedule._initialize_pipeline_distributed_state = _ask_for_shapes
        for stage in stages:
            stage._warmup_forward_vote = lambda *_, **__: _DYNAMIC
            stage._warmup_backward_result = lambda *_, **__: _DYNAMIC
            stage._recv_meta = lambda source, stage=stage: self._say(stage, source)
            stage._send_meta = lambda meta, target, stage=stage: self._hear(stage, meta, target)

    def _say(self, stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return _StageForwardMeta(forward_metas=(extract_tensor_meta(self._hidden()),))
        outputs = stage._stage_meta.outputs
        return _StageBackwardMeta(
            backward_metas=tuple(replace(output, requires_grad=False) for output in outputs)
        )

    def _hear(self, stage: Any, meta: Any, target: int) -> None:
        """Raises RuntimeError when a stage sends other hidden states than the next is told of."""
        if target < stage.stage_index:
            return
        expected = (extract_tensor_meta(self._hidden()),)
        if meta.forward_metas != expected:
            raise RuntimeError(
                f"dry run: pipeline stage {stage.stage_index} passes on {meta.forward_metas}, "
                f"not one hidden state {expected}"
            )

    def _hidden(self) -> torch.Tensor:
        """The hidden state of a microbatch between two stages, as one of them holds it."""
        trainer = self._trainer
        config, dims = trainer.config, trainer.parallel_dims
        split = config.parallelism.enable_sequence_parallel
        local = torch.empty(
            config.parallelism.pipeline_parallel_microbatch_size,
            config.training.seq_len // dims.cp // (dims.tp if split else 1),
            trainer.model_config.dim,
            dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        )
        over_tp = Shard(1) if split else Replicate()
        if dims.spmd_backend == "partial_dtensor" and dims.tp_enabled:
            local = DTensor.from_local(local, dims.get_mesh("tp"), [over_tp], run_check=False)
        elif dims.spmd_backend == "full_dtensor":
            mesh = dims.get_activated_mesh(["dp_replicate", "dp_shard", "cp", "tp"])
            placed = {"cp": Shard(1), "tp": over_tp}
            placements = [placed.get(name, Shard(0)) for name in mesh.mesh_dim_names]
            local = DTensor.from_local(local, mesh, placements, run_check=False)
        return local.requires_grad_()


def _ask_for_shapes(stages: Sequence[Any], *_has_backward_and_transport: bool) -> None:
    """What a schedule does once before its first step, with no rank to agree with."""
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC
