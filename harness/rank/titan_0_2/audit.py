"""What is really in force, read from the live objects after the first step.

Nothing here repeats the config: a degree is the size of a mesh that parameters lie on, a recipe is
what the layers hold, a rotation is the class that ring attention created, a fused node was counted
in a graph that Inductor compiled.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from harness.rank.job import Job
from harness.rank.names import canonical
from harness.rank.titan_0_2.config import Built, flattened
from harness.rank.titan_0_2.shim import Counts
from harness.rank.writer import SCHEMA, write_json


def write_in_force(
    trainer: Any, job: Job, built: Built, counts: Counts, *, is_writer: bool, loss_targets: int
) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world.

    ``loss_targets`` is how many target positions the loss function was given in the step: the
    part of the sequence that this rank trains on, which is what context parallelism divides.
    """
    mine = _see(trainer, counts, loss_targets)
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if is_writer:
        write_json(job.run_folder / "in_force.json", _merge(trainer, job, built, everyone))


def _see(trainer: Any, counts: Counts, loss_targets: int) -> dict[str, Any]:
    """What one rank sees, in values that can be pickled."""
    modules = {
        canonical(name): module
        for part in trainer.model_parts
        for name, module in part.named_modules()
    }
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    return {
        "mesh_sizes": _mesh_sizes(trainer, parameters),
        "pp_rank": _pp_rank(trainer),
        "loss_targets": loss_targets,
        "dtypes": sorted({_name(parameter.dtype) for parameter in parameters}),
        "mixed_precision": sorted(_mixed_precision(trainer, modules.values())),
        "attention": sorted({type(m).__name__ for m in modules.values() if _is_attention(m)}),
        "float8": {name: _recipe(m) for name, m in modules.items() if _is_float8(m)},
        "tp_styles": counts.float8_styles.applied if counts.float8_styles else 0,
        "rotations": dict(counts.rotation.created) if counts.rotation else {},
        "fused": dict(counts.fusion.fused) if counts.fusion else {},
        "compiled": sorted(_compiled(trainer.model_parts)),
        "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
    }


def _merge(trainer: Any, job: Job, built: Built, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole job's view; what differs by pipeline rank is added up over those."""
    training = trainer.job_config.training
    accumulation = trainer.gradient_accumulation_steps
    targets = max(seen["loss_targets"] for seen in everyone)
    cp = training.local_batch_size * accumulation * training.seq_len // targets if targets else 1
    sizes = {
        name: max(seen["mesh_sizes"].get(name, 1) for seen in everyone)
        for name in ("dp_replicate", "fsdp", "tp", "ep")
    }
    stages = list({seen["pp_rank"]: seen for seen in everyone}.values())
    float8 = {name: recipe for seen in everyone for name, recipe in seen["float8"].items()}
    schedule = getattr(trainer, "pp_schedule", None)
    return {
        "schema": SCHEMA,
        "world_size": dist.get_world_size(),
        "degrees": {
            "dp_replicate": sizes["dp_replicate"],
            # torchtitan folds cp into the mesh dimension that shards parameters
            "dp_shard": sizes["fsdp"] // cp,
            "tp": sizes["tp"],
            "cp": cp,
            "pp": len(stages),
            "ep": sizes["ep"],
        },
        "seq_len": training.seq_len,
        "local_batch_size": training.local_batch_size,
        "global_batch_size": training.local_batch_size * accumulation * _dp_degree(trainer),
        "gradient_accumulation_steps": accumulation,
        "pipeline_schedule": type(schedule).__name__ if schedule is not None else None,
        "pipeline_microbatches": schedule._n_microbatches if schedule is not None else None,
        "param_dtype": _one(seen["dtypes"] for seen in everyone),
        "mixed_precision_param": _one(seen["mixed_precision"] for seen in everyone),
        "float8": {
            "modules": len(float8),
            "recipe": _one([{recipe for recipe, _ in float8.values()}]),
            "emulated": any(emulated for _, emulated in float8.values()),
            "tp_styles": sum(seen["tp_styles"] for seen in stages),
        },
        "compile": {
            "regions": len({name for seen in everyone for name in seen["compiled"]}),
            "graphs": sum(seen["graphs"] for seen in stages),
        },
        "async_tp": {"fused_nodes": dict(_sum(seen["fused"] for seen in stages))},
        "attention": _one(seen["attention"] for seen in everyone),
        "cp_rotation": _one(seen["rotations"] for seen in everyone),
        "without_fixes": list(job.without_fixes),
        "injected": job.inject,
        "config": flattened(trainer.job_config),
        "declared": list(built.declared),
    }


def _mesh_sizes(trainer: Any, parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """Size of every mesh dimension that some parameter lies on, or that DDP reduces over."""
    sizes = {
        name: parameter.device_mesh.size(dim)
        for parameter in parameters
        if isinstance(parameter, DTensor)
        for dim, name in enumerate(parameter.device_mesh.mesh_dim_names or ())
    }
    from torch.distributed._composable.contract import _get_registry
    from torch.distributed._composable.replicate import replicate

    for part in trainer.model_parts:
        if "replicate" in (_get_registry(part) or {}):
            sizes["dp_replicate"] = replicate.state(part)._ddp.process_group.size()
    return sizes


def _dp_degree(trainer: Any) -> int:
    batch = trainer.parallel_dims.get_optional_mesh("batch")
    return batch.size() if batch is not None else 1


def _pp_rank(trainer: Any) -> int:
    pp = trainer.parallel_dims.get_optional_mesh("pp")
    return pp.get_local_rank() if pp is not None else 0


def _mixed_precision(trainer: Any, modules: Iterable[torch.nn.Module]) -> set[str]:
    """Types that parameters are cast to for computation, by FSDP or else by autocast."""
    from torch.distributed.fsdp import FSDPModule

    policies = [m._get_fsdp_state()._mp_policy for m in modules if isinstance(m, FSDPModule)]
    amp = trainer.maybe_enable_amp
    if not policies and isinstance(amp, torch.autocast) and amp._enabled:
        return {_name(amp.fast_dtype)}
    return {_name(policy.param_dtype) for policy in policies if policy.param_dtype is not None}


def _is_attention(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("AttentionWrapper")


def _is_float8(module: torch.nn.Module) -> bool:
    # By name, so that runs without Float8 do not import torchao.
    return any(base.__name__ == "Float8Linear" for base in type(module).__mro__)


def _recipe(module: Any) -> tuple[str, bool]:
    """A Float8 layer's recipe, by how it scales its operands, and whether it is emulated."""
    config = module.config
    if config.cast_config_input.scaling_granularity.value == "tensorwise":
        return "tensorwise", config.emulate
    high_precision = config.cast_config_input_for_grad_weight.scaling_type.value == "disabled"
    return "rowwise_with_gw_hp" if high_precision else "rowwise", config.emulate


def _compiled(model_parts: Iterable[torch.nn.Module]) -> set[str]:
    """Names of compiled modules; ``torch.compile(module)`` wraps, as apply_compile uses it."""
    from torch._dynamo.eval_frame import OptimizedModule

    return {
        canonical(name)
        for part in model_parts
        for name, module in part.named_modules()
        if isinstance(module, OptimizedModule)
    }


def _sum(counts: Iterable[dict[str, int]]) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)
    return total


def _one(names: Iterable[Iterable[str]]) -> str | None:
    """All distinct names joined; usually there is one. None when there is none."""
    distinct = sorted({name for group in names for name in group})
    return "+".join(distinct) or None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
