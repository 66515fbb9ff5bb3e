"""What is really in force after the first step: ``in_force.json``, read from the live objects.

The tensor-parallel degree is how many times the width of all heads is that of a rank's weight, the
expert-parallel degree how many times all experts are those of a rank; the pipeline stages follow
from the layers that ranks hold; the data-parallel degree is the size of the group over which DDP
reduces. If the optimizer is the distributed one, it shards over an instance, which is a part of
that group or all of it. What Megatron-FSDP shards is seen in its buffers. Sequence parallelism is
seen in the length of the sequence that a layer's norm gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)

from converge_harness.rank.megatron.config import INTERLEAVED, NO_SHARD
from converge_harness.rank.megatron.model import Wrapped
from converge_harness.rank.megatron.parameters import CanonicalPart, optimizers_of
from converge_harness.rank.megatron.trainer import MegatronTrainer
from converge_harness.rank.recorder import world
from converge_harness.rank.recorder.names import names_by_type
from converge_harness.rank.recorder.placement import Piece, local_shard
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.run_folder import in_force

_SEQUENCE_PARALLEL = "transformer.sequence_parallel"
_IN_FLOAT32 = "ddp.grad_reduce_in_fp32"
_STRATEGY = "ddp.data_parallel_sharding_strategy"
_DISPATCHER = "transformer.moe_token_dispatcher_type"
_DISPATCHERS = {
    MoEAllGatherTokenDispatcher: "allgather",
    MoEAlltoAllTokenDispatcher: "alltoall",
}
_SCHEDULES = {
    "forward_backward_pipelining_without_interleaving": "1F1B",
    "forward_backward_pipelining_with_interleaving": INTERLEAVED,
}
"""Of functions that run a step, the name of the schedule."""


class FirstStepWatch:
    """What this rank's modules and batches look like from now on."""

    def __init__(self, trainer: MegatronTrainer, parts: Sequence[CanonicalPart]) -> None:
        self.lengths: set[int] = set()
        """Of the sequences that the norms of layers got."""
        self.microbatches = 0
        self._handles = [
            layer.input_layernorm.register_forward_pre_hook(self._see)
            for part in parts
            for layer in part.layers.values()
        ]
        forward_step = trainer.forward_step

        def counted(batches: Any, part: Any) -> Any:
            self.microbatches += part is trainer.parts[0]
            return forward_step(batches, part)

        trainer.forward_step = counted  # type: ignore[method-assign]

    def _see(self, _norm: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self.lengths.add(int(given[0].shape[0]))

    def stop(self) -> None:
        """Leave the modules; microbatches go on being counted, which costs nothing."""
        for handle in self._handles:
            handle.remove()


def write_in_force(
    folder: Path,
    trainer: MegatronTrainer,
    parts: Sequence[CanonicalPart],
    pieces: Sequence[Piece],
    first: FirstStepWatch,
    recorder: StepRecorder,
    injected: Sequence[str],
) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world."""
    first.stop()
    everyone = world.everyones(_seen(trainer, parts, pieces, first, recorder, injected))
    if recorder.is_writer:
        in_force.write_in_force(folder, _merged(trainer, everyone))


def _seen(
    trainer: MegatronTrainer,
    parts: Sequence[CanonicalPart],
    pieces: Sequence[Piece],
    first: FirstStepWatch,
    recorder: StepRecorder,
    injected: Sequence[str],
) -> dict[str, Any]:
    seq_len = recorder.positions // recorder.samples
    return {
        "tp": tp_degree(parts),
        **experts_of(parts),
        "layers": sorted(int(number) for part in parts for number in part.layers),
        **data_parallel(trainer.parts[0], trainer.optimizer),
        "strategies": sorted({strategy_of(part) for part in trainer.parts}),
        "reduces_in_float32": all(map(reduces_in_float32, trainer.parts)),
        "seq_len": seq_len,
        "sequence_parallel": bool(first.lengths) and max(first.lengths) < seq_len,
        "samples": recorder.samples if recorder.view.first_of_dp else 0,
        "local_batch_size": recorder.samples // max(first.microbatches, 1),
        "microbatches": first.microbatches,
        "schedule": _SCHEDULES.get(get_forward_backward_func().__name__),
        "dtypes": {
            piece.name: str(piece.parameter.dtype).removeprefix("torch.") for piece in pieces
        },
        "injected": list(injected),
    }


def shards(optimizer: Any) -> bool:
    """Whether some optimizer of a ``ChainedOptimizer`` is the distributed one."""
    return any(isinstance(each, DistributedOptimizer) for each in optimizers_of(optimizer))


def data_parallel(part: Wrapped, optimizer: Any) -> dict[str, int]:
    """``dp_shard``: ranks that an instance shards over; ``dp_replicate``: instances, or copies."""
    dp = _dp_group(part).size()
    sharded = _instance(part).size() if shards(optimizer) else 1
    return {"dp_replicate": dp // sharded, "dp_shard": sharded}


def _dp_group(part: Wrapped) -> dist.ProcessGroup:
    if isinstance(part, DistributedDataParallel):
        return part.dp_group
    return part.megatron_fsdp_dist_index.get_dp_group()


def _instance(part: Wrapped) -> dist.ProcessGroup:
    """The ranks over which an instance of the distributed optimizer or of Megatron-FSDP shards."""
    if isinstance(part, DistributedDataParallel):
        return part.intra_dp_cp_group
    return part.megatron_fsdp_dist_index.get_fsdp_group()


def strategy_of(part: Wrapped) -> str:
    """Which of optimizer states, gradients and weights Megatron-FSDP shards, by its buffers.

    What only some of the parameters have gets a question mark, and is no strategy's name.
    """
    if isinstance(part, DistributedDataParallel):
        return NO_SHARD
    buffer = part.param_and_grad_buffer
    # Experts that ranks have to themselves (ep equal to dp) are not sharded any further.
    groups = [
        group
        for group in buffer.parameter_groups
        if group.main_grad_buffer and group.main_grad_buffer.data_parallel_group.size() > 1
    ]
    mains = {id(main.orig_param): main for _, main in buffer.optimizer_named_parameters}
    shared = [mains[id(each)] for group in groups for each in group.params]
    # A small one may be on one rank as a whole.
    entries = sum(local_shard(main).numel() for main in shared)
    seen = {
        "optim": {entries < sum(main.orig_param.numel() for main in shared)},
        "grads": {group.main_grad_buffer.is_data_distributed for group in groups},
        "params": {group.model_weight_buffer.is_data_distributed for group in groups},
    }
    return "_".join(
        name if found == {True} else f"{name}?" for name, found in seen.items() if True in found
    )


def reduces_in_float32(part: Wrapped) -> bool:
    """Whether gradients of microbatches and ranks are added up in float32.

    Since 0.17 Megatron-FSDP ignores ``grad_reduce_in_fp32``, and has keys of its own.
    """
    if isinstance(part, DistributedDataParallel):
        return bool(part.ddp_config.grad_reduce_in_fp32)
    sent = getattr(part.ddp_config, "megatron_fsdp_grad_comm_dtype", None)
    groups = part.param_and_grad_buffer.parameter_groups
    kinds = {group.main_grad_buffer.dtype for group in groups if group.main_grad_buffer}
    return kinds == {torch.float32} and sent in (None, torch.float32)


def tp_degree(parts: Sequence[CanonicalPart]) -> int:
    """By how many ranks weights are divided; 1 for a rank without layers."""
    for part in parts:
        for layer in part.layers.values():
            width = layer.config.num_attention_heads * layer.config.kv_channels
            mine = local_shard(layer.self_attention.linear_proj.weight)
            return int(width // mine.shape[1])
    return 1


def experts_of(parts: Sequence[CanonicalPart]) -> dict[str, Any]:
    """By how many ranks experts are divided, and what sends tokens to them."""
    for part in parts:
        for layer in part.layers.values():
            if isinstance(layer.mlp, MoELayer):
                return {
                    "ep": layer.config.num_moe_experts // len(layer.mlp.experts.local_experts),
                    "dispatchers": dispatchers_of(parts),
                }
    return {"ep": 1, "dispatchers": ()}


def dispatchers_of(parts: Sequence[CanonicalPart]) -> tuple[str, ...]:
    """What sends tokens to experts in this rank's layers: an unknown class by its own name.

    So it differs from every name that a job can give, and no set runs it unseen.
    """
    kinds = {
        type(layer.mlp.token_dispatcher)
        for part in parts
        for layer in part.layers.values()
        if isinstance(layer.mlp, MoELayer)
    }
    return tuple(sorted(_DISPATCHERS.get(kind, kind.__name__) for kind in kinds))


def _merged(
    trainer: MegatronTrainer, everyone: Sequence[dict[str, Any]]
) -> in_force.InForceDocument:
    def largest(key: str) -> int:
        return max(int(seen[key]) for seen in everyone)

    stages = len({tuple(seen["layers"]) for seen in everyone})
    schedule = next((seen["schedule"] for seen in everyone if seen["schedule"]), None)
    dispatchers = {each for seen in everyone for each in seen["dispatchers"]}
    strategies = {each for seen in everyone for each in seen["strategies"]}
    # What is in float32 anyway needs no reduction in it.
    low = trainer.config.dtype is not torch.float32
    in_float32 = all(seen["reduces_in_float32"] for seen in everyone)
    config = {
        **trainer.config.flat,
        # Joined where layers or ranks differ, so that it is none of the names of a job.
        **({_DISPATCHER: "+".join(sorted(dispatchers))} if dispatchers else {}),
        _STRATEGY: "+".join(sorted(strategies)),
        **({_IN_FLOAT32: in_float32} if low else {}),
        _SEQUENCE_PARALLEL: any(seen["sequence_parallel"] for seen in everyone),
    }
    dtype, dtypes = in_force.param_dtypes(names_by_type(seen["dtypes"] for seen in everyone))
    return {
        "world_size": world.size(),
        "degrees": {
            "dp_replicate": largest("dp_replicate"),
            "dp_shard": largest("dp_shard"),
            "tp": largest("tp"),
            "cp": 1,
            "pp": stages,
            "ep": largest("ep"),
        },
        "seq_len": largest("seq_len"),
        "local_batch_size": largest("local_batch_size"),
        "global_batch_size": sum(seen["samples"] for seen in everyone),
        "gradient_accumulation_steps": largest("microbatches"),
        "pipeline_schedule": schedule,
        "pipeline_microbatches": largest("microbatches") if schedule else None,
        "param_dtype": dtype,
        "param_dtypes": dtypes,
        "without_fixes": [],
        "injected": "+".join(sorted({each for seen in everyone for each in seen["injected"]}))
        or None,
        "config": config,
        "declared": list(trainer.config.declared),
    }
