"""Held out in bf16 mixed, C3: replicas drift apart."""

from __future__ import annotations

from typing import Any

import torch
from hooks import replace_update
from places import Action, before_step, coordinate, local, parameters


def replica_starts_from_bf16(trainer: Any) -> None:
    """Replica 1 gets its initial weights through bf16; replica 0 keeps the float32 ones.

    In bf16 the first forward pass is the same on both, and so is the first gradient.

    Reference: class of pytorch/torchtitan#166 (initial weights not the same on all ranks)
    Class: C3
    Technique: DDP 2
    First step: 1
    Signature: the replicas' weights differ by up to 2**-9 of their size from the start; loss alike
    Cause: replicas differ
    """

    def round_weights() -> None:
        if coordinate(trainer, "dp_replicate") == 1:
            with torch.no_grad():
                for _, parameter in parameters(trainer):
                    weights = local(parameter)
                    weights.copy_(weights.bfloat16().float())

    before_step(trainer, 1, round_weights)


def replica_skips_spike(trainer: Any) -> None:
    """The guard against loss spikes looks at the local loss; replica 1 skips the update of step 5.

    Reference: class of NVIDIA/Megatron-LM's ``found_inf`` not reduced over all ranks
    Class: C3
    Technique: HSDP 2 x 2
    First step: 5
    Signature: from step 5 on the replicas' weights differ by an update; the gradient norm is alike
    Cause: replicas differ
    """

    def make(step: Action) -> Action:
        def guarded(*arguments: Any, **options: Any) -> None:
            if trainer.step == 5 and coordinate(trainer, "dp_replicate") == 1:
                return
            step(*arguments, **options)

        return guarded

    replace_update(trainer, make)
