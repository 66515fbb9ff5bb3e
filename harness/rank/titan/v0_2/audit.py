"""What is really in force, where torchtitan 0.2 differs from other releases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from converge_harness.rank.own_techniques import OwnTechniques
from converge_harness.rank.recorder.names import canonical
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.titan.common import audit
from converge_harness.rank.titan.common.audit import Happened
from converge_harness.rank.titan.v0_2.config import Built, flat_config
from converge_harness.rank.titan.v0_2.shim import Prepared


def write_in_force(
    trainer: Any,
    built: Built,
    prepared: Prepared,
    recorder: StepRecorder,
    injected: list[str],
    own: OwnTechniques,
) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world."""
    happened = Happened(
        injected=injected,
        fixes_left_out=prepared.fixes_left_out,
        rotation=prepared.rotation,
        fusion=prepared.fusion,
        own=own,
    )
    mine = audit.see(trainer, recorder, happened)
    mine["local_batch_size"] = trainer.job_config.training.local_batch_size
    modules = audit.live_modules(trainer).values()
    mine["mesh_sizes"] |= _ddp_size(trainer)
    mine["mixed_precision"] = mine["mixed_precision"] or _autocast(trainer)
    mine["attention"] = sorted({type(m).__name__ for m in modules if _is_attention(m)})
    mine["compiled"] = sorted(_compiled(trainer.model_parts))
    mine["tp_styles"] = prepared.float8_styles.applied if prepared.float8_styles else 0
    mine["spmd_backends"] = []  # torchtitan 0.2 has none to choose from
    config = flat_config(trainer.job_config)
    audit.write_in_force(recorder.folder, trainer, recorder, mine, config, built.declared)


def _ddp_size(trainer: Any) -> dict[str, int]:
    """Over how many ranks DDP reduces gradients; its parameters lie on no mesh."""
    from torch.distributed._composable.contract import _get_registry
    from torch.distributed._composable.replicate import replicate

    sizes = [
        replicate.state(part)._ddp.process_group.size()
        for part in trainer.model_parts
        if "replicate" in (_get_registry(part) or {})
    ]
    return {"dp_replicate": max(sizes)} if sizes else {}


def _autocast(trainer: Any) -> list[str]:
    """The data type that DDP and single ranks compute in, where no FSDP casts parameters."""
    amp = trainer.maybe_enable_amp
    if isinstance(amp, torch.autocast) and amp._enabled:
        return [audit.dtype_name(amp.fast_dtype)]
    return []


def _is_attention(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("AttentionWrapper")


def _compiled(model_parts: Iterable[torch.nn.Module]) -> set[str]:
    """Names of compiled modules; ``torch.compile(module)`` wraps, as apply_compile uses it."""
    from torch._dynamo.eval_frame import OptimizedModule

    return {
        canonical(name)
        for part in model_parts
        for name, module in part.named_modules()
        if isinstance(module, OptimizedModule)
    }
