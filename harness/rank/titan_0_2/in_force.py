"""What really ran, read off the live trainer, never off the config that asked for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from harness.rank.job import Job
from harness.rank.titan_0_2.config import Built, flattened
from harness.rank.titan_0_2.shim import Counts
from harness.rank.writer import SCHEMA


def audit(trainer: Any, job: Job, built: Built, counts: Counts) -> dict[str, Any]:
    """``in_force.json`` as seen by this rank after the first step."""
    config = trainer.job_config
    modules = [module for part in trainer.model_parts for module in part.modules()]
    local_batch_size = config.training.local_batch_size
    dp_degree = _size(trainer, "batch")
    return {
        "schema": SCHEMA,
        "world_size": dist.get_world_size(),
        "degrees": degrees(trainer),
        "seq_len": config.training.seq_len,
        "local_batch_size": local_batch_size,
        "global_batch_size": local_batch_size * dp_degree * trainer.gradient_accumulation_steps,
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        **_pipeline(trainer),
        "param_dtype": _only(parameter.dtype for parameter in _parameters(trainer)),
        "mixed_precision_param": _compute_dtype(trainer, modules),
        "float8": _float8(modules, counts),
        "compile": _compile(modules),
        "async_tp": None if counts.fusion is None else {"fused_nodes": dict(counts.fusion.fused)},
        "attention": _only(_attention(module) for module in modules if _attention(module)),
        "cp_rotation": None if counts.rotation is None else counts.rotation.method,
        "without_fixes": list(job.without_fixes),
        "injected": job.inject,
        "config": flattened(config),
        "declared": list(built.declared),
    }


def degrees(trainer: Any) -> dict[str, int]:
    """Parallelism degrees of the meshes that exist. FSDP's mesh is dp_shard and cp in one."""
    cp = _size(trainer, "cp")
    return {
        "dp_replicate": _size(trainer, "dp_replicate"),
        "dp_shard": _size(trainer, "fsdp") // cp,
        "tp": _size(trainer, "tp"),
        "cp": cp,
        "pp": _size(trainer, "pp"),
        "ep": _size(trainer, "ep"),
    }


def _size(trainer: Any, name: str) -> int:
    mesh = trainer.parallel_dims.get_optional_mesh(name)
    return 1 if mesh is None else mesh.size()


def _pipeline(trainer: Any) -> dict[str, Any]:
    schedule = getattr(trainer, "pp_schedule", None)
    return {
        "pipeline_schedule": None if schedule is None else type(schedule).__name__,
        "pipeline_microbatches": None if schedule is None else schedule._n_microbatches,
    }


def _parameters(trainer: Any) -> list[torch.nn.Parameter]:
    return [parameter for part in trainer.model_parts for parameter in part.parameters()]


def _compute_dtype(trainer: Any, modules: Iterable[torch.nn.Module]) -> str | None:
    """Type in which parameters compute: FSDP's policy, else autocast's, else their own."""
    from torch.distributed.fsdp import FSDPModule

    policies = [
        module._get_fsdp_state()._mp_policy.param_dtype
        for module in modules
        if isinstance(module, FSDPModule)
    ]
    if policies:
        own = {parameter.dtype for parameter in _parameters(trainer)}
        return _only(dtype or next(iter(own)) for dtype in policies)
    amp = trainer.maybe_enable_amp
    if isinstance(amp, torch.autocast) and amp._enabled:
        return _name(amp.fast_dtype)
    return _only(parameter.dtype for parameter in _parameters(trainer))


def _float8(modules: Iterable[torch.nn.Module], counts: Counts) -> dict[str, Any] | None:
    """Float8 linear layers on this rank; None when the config asks for none."""
    if counts.float8_styles is None:
        return None
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear

    configs = [module.config for module in modules if isinstance(module, Float8Linear)]
    recipes = {
        ScalingGranularity.TENSORWISE: "tensorwise",
        ScalingGranularity.AXISWISE: "rowwise",
    }
    return {
        "modules": len(configs),
        "recipe": _only(recipes[c.cast_config_input.scaling_granularity] for c in configs),
        "emulated": any(c.emulate for c in configs),
        "tp_styles": counts.float8_styles.applied,
    }


def _compile(modules: Iterable[torch.nn.Module]) -> dict[str, int] | None:
    """Compiled modules, and graphs that Dynamo really captured in this process."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._dynamo.utils import counters

    regions = sum(isinstance(module, OptimizedModule) for module in modules)
    graphs = int(counters["stats"]["unique_graphs"])
    return {"regions": regions, "graphs": graphs} if regions or graphs else None


def _attention(module: torch.nn.Module) -> str | None:
    name = type(module).__name__
    return name if name.endswith("AttentionWrapper") else None


def _only(values: Iterable[Any]) -> str | None:
    """The one value there is, ``mixed`` for several, None for none."""
    names = {_name(value) for value in values}
    if not names:
        return None
    return names.pop() if len(names) == 1 else "mixed"


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
