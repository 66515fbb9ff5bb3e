"""What is really in force, read from the live objects after the first step.

Nothing here repeats the config: a degree is the size of a mesh that parameters lie on, a recipe
is what the layers hold, a schedule is the class of the object that ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import FlexAttention

from harness.rank.fusion import FusionCount
from harness.rank.job import Job
from harness.rank.names import canonical
from harness.rank.probe import Probe
from harness.rank.titan_0_3.config import BuiltConfig
from harness.rank.writer import SCHEMA, write_json


def write_in_force(
    trainer: Any, job: Job, config: BuiltConfig, probe: Probe, fusion: FusionCount | None
) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world."""
    mine = _see(trainer, probe.loss_targets)
    mine["fused"] = fusion.fused if fusion else Counter()
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if probe.is_writer:
        write_json(Path(job.run_folder) / "in_force.json", _merge(trainer, job, config, everyone))


def _see(trainer: Any, loss_targets: int) -> dict[str, Any]:
    """What one rank sees, in values that can be pickled."""
    modules = {
        canonical(name): module
        for part in trainer.model_parts
        for name, module in part.named_modules()
    }
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    return {
        "mesh_sizes": _mesh_sizes(parameters),
        "pp_rank": _pp_rank(trainer),
        "loss_targets": loss_targets,
        "dtypes": sorted({_name(p.dtype) for p in parameters}),
        "mixed_precision": sorted(_mixed_precision(modules.values())),
        "attention": sorted(
            {type(m).__name__ for m in modules.values() if isinstance(m, FlexAttention)}
        ),
        "float8": {name: _recipe(m) for name, m in modules.items() if _is_float8(m)},
        "compiled": [name for name, module in modules.items() if _is_compiled(module)],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def _merge(
    trainer: Any, job: Job, config: BuiltConfig, everyone: list[dict[str, Any]]
) -> dict[str, Any]:
    trainer_config = trainer.config
    local_batch_size = trainer_config.training.local_batch_size
    seq_len = trainer_config.training.seq_len
    accumulation = trainer.gradient_accumulation_steps
    # How much of its sequences a rank's loss function was given: what context parallelism divides.
    targets = max(seen["loss_targets"] for seen in everyone)
    cp = local_batch_size * accumulation * seq_len // targets if targets else 1
    sizes = {
        name: max(seen["mesh_sizes"].get(name, 1) for seen in everyone)
        for name in ("dp_replicate", "fsdp", "dp_shard", "tp", "ep")
    }
    float8 = {name: recipe for seen in everyone for name, recipe in seen["float8"].items()}
    compiled = {name for seen in everyone for name in seen["compiled"]}
    schedule = getattr(trainer, "pp_schedule", None)
    # All ranks of a stage compile the same: one of each stands for them.
    stages = list({seen["pp_rank"]: seen for seen in everyone}.values())
    return {
        "schema": SCHEMA,
        "world_size": dist.get_world_size(),
        "degrees": {
            "dp_replicate": sizes["dp_replicate"],
            # partial_dtensor folds cp into the mesh dimension that shards parameters
            "dp_shard": max(sizes["dp_shard"], sizes["fsdp"] // cp),
            "tp": sizes["tp"],
            "cp": cp,
            "pp": len({seen["pp_rank"] for seen in everyone}),
            "ep": sizes["ep"],
        },
        "seq_len": seq_len,
        "local_batch_size": local_batch_size,
        "global_batch_size": local_batch_size * accumulation * _dp_degree(trainer),
        "gradient_accumulation_steps": accumulation,
        "pipeline_schedule": type(schedule).__name__ if schedule is not None else None,
        "pipeline_microbatches": schedule._n_microbatches if schedule is not None else None,
        "param_dtype": _one(seen["dtypes"] for seen in everyone),
        "mixed_precision_param": _one(seen["mixed_precision"] for seen in everyone),
        "float8": {
            "modules": len(float8),
            "recipe": _one([sorted({recipe for recipe, _ in float8.values()})]),
            "emulated": any(emulated for _, emulated in float8.values()),
            "tp_styles": 0,
        },
        "compile": {
            "regions": len(compiled),
            "graphs": sum(seen["graphs"] for seen in stages),
        },
        "async_tp": {"fused_nodes": dict(sum((seen["fused"] for seen in stages), Counter()))},
        "attention": _one(seen["attention"] for seen in everyone),
        "cp_rotation": "allgather" if cp > 1 else None,
        "without_fixes": list(job.without_fixes),
        "injected": job.inject,
        "config": dict(config.flat),
        "declared": list(config.declared),
    }


def _mesh_sizes(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """Size of every mesh dimension that some parameter lies on."""
    return {
        name: parameter.device_mesh.size(dim)
        for parameter in parameters
        if isinstance(parameter, DTensor)
        for dim, name in enumerate(parameter.device_mesh.mesh_dim_names or ())
    }


def _dp_degree(trainer: Any) -> int:
    batch = trainer.parallel_dims.get_optional_mesh("batch")
    return batch.size() if batch is not None else 1


def _pp_rank(trainer: Any) -> int:
    pp = trainer.parallel_dims.get_optional_mesh("pp")
    return pp.get_local_rank() if pp is not None else 0


def _mixed_precision(modules: Iterable[torch.nn.Module]) -> set[str]:
    """Data types that FSDP casts parameters to for computation."""
    policies = [m._get_fsdp_state()._mp_policy for m in modules if isinstance(m, FSDPModule)]
    return {_name(p.param_dtype) for p in policies if p.param_dtype is not None}


def _is_float8(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "Float8Linear" for base in type(module).__mro__)


def _recipe(module: Any) -> tuple[str, bool]:
    """A Float8 layer's recipe, by how it scales its operands, and whether it is emulated."""
    config = module.config
    granularity = config.cast_config_input.scaling_granularity.value
    if granularity == "tensorwise":
        return "tensorwise", config.emulate
    keeps_weight_gradient = (
        config.cast_config_input_for_grad_weight.scaling_type.value == "disabled"
    )
    return "rowwise_with_gw_hp" if keeps_weight_gradient else "rowwise", config.emulate


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one(names: Iterable[Iterable[str]]) -> str | None:
    """All distinct names joined; usually there is one. None when there is none."""
    distinct = sorted({name for group in names for name in group})
    return "+".join(distinct) or None
