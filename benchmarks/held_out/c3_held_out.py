"""Held out, C3: ranks that should hold the same tensor do not."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from places import coordinate, local, parameters


def replica_group_of_one(trainer: Any) -> None:
    """Layer 2 reduces its gradients over a group that holds this replica only.

    The group was made from the wrong list of ranks; a sum over one rank raises nothing.

    Reference: class of torchtitan issue 1929, funasr pull 3472
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: gradients and then weights of layers.2 differ between the replicas
    Cause: replicas differ
    Says: layers.2 | replica
    """
    alone, _ = dist.new_subgroups(group_size=1)
    state = trainer.model_parts[0].layers["2"]._get_fsdp_state()
    for group in state._fsdp_param_groups:
        group.mesh_info = copy.copy(group.mesh_info)
        group.mesh_info.replicate_process_group = alone


def replica_from_rounded_copy(trainer: Any) -> None:
    """The second replica starts from the checkpoint's bf16 export, the first from fp32.

    Reference: class of torchtitan issue 166
    Class: C3
    Technique: DDP 2, start from a checkpoint
    First step: 0
    Signature: initial weights of the replicas differ by bf16 rounding
    Cause: replicas differ
    Says: replica
    """
    load = trainer.checkpointer.load

    def load_and_round(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        if coordinate(trainer, "dp_replicate") == 1:
            with torch.no_grad():
                for _, parameter in parameters(trainer):
                    shard = local(parameter)
                    shard.copy_(shard.bfloat16())
        return loaded

    trainer.checkpointer.load = load_and_round


def overflow_seen_by_one(trainer: Any) -> None:
    """At step 3 one replica finds an overflow and leaves its update out, the other does not.

    The flag that says so is never reduced over the replicas.

    Reference: Neuron_SP issue 2, WeatherGenerator issue 2724, pytorch issue 136009
    Class: C3
    Technique: DDP 2, dynamic loss scale
    First step: 3
    Signature: all weights of the replicas differ from the update of step 3 on
    Cause: replicas differ
    Says: replica
    """
    step = trainer.optimizers.step

    def stepping(*arguments: Any, **options: Any) -> None:
        if trainer.step == 3 and coordinate(trainer, "dp_replicate") == 1:
            return
        step(*arguments, **options)

    trainer.optimizers.step = stepping
