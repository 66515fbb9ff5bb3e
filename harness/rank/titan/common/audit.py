"""What is really in force after the first step, for every dialect: ``in_force.json``.

Observed in the live objects: degrees are sizes of meshes that parameters lie on, and how much of
the samples reaches the loss function; the sequence length and the global batch are counted in what
the loader gave; recipes are what layers hold; rotations and fused nodes were counted where they
happen; ``without_fixes`` are the repairs that the config called for and that were not made;
``injected`` is what was called. Taken from the trainer, as its loop uses them, are the local batch
size and the accumulation steps; ``config`` and ``declared`` repeat the config on purpose.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from converge_harness.rank.own_techniques import OwnTechniques, together
from converge_harness.rank.recorder.names import canonical, names_by_type
from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.titan.common.counters import FusionCount, RotationCount
from converge_harness.run_folder import in_force

FOLDED = ("fsdp", "dp_shard_cp")
"""Mesh dimensions over which parameters are sharded by dp_shard x cp: torchtitan's own fold, and
FSDP's of a mesh that has both (``spmd_types``, ``full_dtensor``)."""


@dataclass(frozen=True, slots=True)
class Happened:
    """What left no trace in the trainer and was noted on this rank while it happened."""

    injected: Sequence[str] = ()
    """What ``inject.call_injected`` says that it called."""
    own: OwnTechniques | None = None
    """The experiment file's own techniques; None: it has none."""
    fixes_left_out: Sequence[str] = ()
    """Repairs that the config called for and that were not made."""
    rotation: RotationCount | None = None
    """None without context parallelism."""
    fusion: FusionCount | None = None
    """None without async tensor parallelism."""


def live_modules(trainer: Any) -> dict[str, torch.nn.Module]:
    """This rank's modules by canonical name."""
    return {
        canonical(name): module
        for part in trainer.model_parts
        for name, module in part.named_modules()
    }


def see(trainer: Any, recorder: StepRecorder, happened: Happened) -> dict[str, Any]:
    """What one rank sees, in values that can be pickled.

    A dialect adds ``local_batch_size``, ``attention``, ``compiled``, ``tp_styles`` and
    ``spmd_backends``.
    """
    modules = live_modules(trainer)
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    pp = trainer.parallel_dims.get_optional_mesh("pp")
    rotation, fusion = happened.rotation, happened.fusion
    return {
        "mesh_sizes": _mesh_sizes(parameters),
        "pp_rank": pp.get_local_rank() if pp is not None else 0,
        "seq_len": recorder.positions // recorder.samples,
        # Context parallelism divides each sequence between the loss functions of several ranks.
        "cp": recorder.positions // recorder.loss_targets if recorder.loss_targets else 1,
        "counted_samples": recorder.samples if recorder.view.first_of_dp else 0,
        "dtypes": {
            canonical(name): dtype_name(parameter.dtype)
            for part in trainer.model_parts
            for name, parameter in part.named_parameters()
        },
        "mixed_precision": sorted(_mixed_precision(modules.values())),
        "float8": {name: _recipe(m) for name, m in modules.items() if _is_float8(m)},
        "rotations": sorted(rotation.used) if rotation else [],
        "fused": dict(fusion.fused) if fusion else {},
        "graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        "fixes_left_out": list(happened.fixes_left_out),
        "injected": list(happened.injected),
        "own_techniques": happened.own.see(trainer) if happened.own else [],
    }


def write_in_force(
    folder: Path,
    trainer: Any,
    recorder: StepRecorder,
    mine: dict[str, Any],
    config: Mapping[str, Any],
    declared: Sequence[str],
) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world.

    ``config`` is the trainer's whole config by dotted keys, ``declared`` the keys the job set.
    """
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if recorder.is_writer:
        in_force.write_in_force(folder, _merge(trainer, everyone, config, declared))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _merge(
    trainer: Any,
    everyone: list[dict[str, Any]],
    config: Mapping[str, Any],
    declared: Sequence[str],
) -> in_force.InForceDocument:
    """The whole job's view; what differs by pipeline rank is added up over those."""
    # All ranks of a stage compile the same: one of each stands for them.
    stages = list({seen["pp_rank"]: seen for seen in everyone}.values())
    float8 = {name: recipe for seen in everyone for name, recipe in seen["float8"].items()}
    schedule = getattr(trainer, "pp_schedule", None)
    dtype, dtypes = in_force.param_dtypes(names_by_type(seen["dtypes"] for seen in everyone))
    merged: in_force.InForceDocument = {
        "world_size": dist.get_world_size(),
        "degrees": _degrees(everyone),
        "seq_len": max(seen["seq_len"] for seen in everyone),
        "local_batch_size": max(seen["local_batch_size"] for seen in everyone),
        "global_batch_size": sum(seen["counted_samples"] for seen in everyone),
        "gradient_accumulation_steps": trainer.gradient_accumulation_steps,
        "pipeline_schedule": type(schedule).__name__ if schedule is not None else None,
        "pipeline_microbatches": schedule._n_microbatches if schedule is not None else None,
        "param_dtype": dtype,
        "param_dtypes": dtypes,
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
        "spmd_backend": _one(seen["spmd_backends"] for seen in everyone),
        "without_fixes": sorted({fix for seen in everyone for fix in seen["fixes_left_out"]}),
        "injected": _one(seen["injected"] for seen in everyone),
        "config": dict(config),
        "declared": list(declared),
    }
    if own := together(seen["own_techniques"] for seen in everyone):
        merged["own_techniques"] = own  # absent without any, as in runs of older releases
    return merged


def _degrees(everyone: list[dict[str, Any]]) -> dict[str, int]:
    def size(name: str) -> int:
        return max(seen["mesh_sizes"].get(name, 1) for seen in everyone)

    cp = max(seen["cp"] for seen in everyone)
    return {
        "dp_replicate": size("dp_replicate"),
        "dp_shard": max(size("dp_shard"), *(size(name) // cp for name in FOLDED)),
        "tp": size("tp"),
        "cp": cp,
        "pp": len({seen["pp_rank"] for seen in everyone}),
        "ep": size("ep"),
    }


def _mesh_sizes(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """Size of every mesh dimension that some parameter lies on."""
    return {
        name: parameter.device_mesh.size(dim)
        for parameter in parameters
        if isinstance(parameter, DTensor)
        for dim, name in enumerate(parameter.device_mesh.mesh_dim_names or ())
    }


def _mixed_precision(modules: Iterable[torch.nn.Module]) -> set[str]:
    """Data types that FSDP casts parameters to for computation."""
    policies = [m._get_fsdp_state()._mp_policy for m in modules if isinstance(m, FSDPModule)]
    return {dtype_name(p.param_dtype) for p in policies if p.param_dtype is not None}


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


def _sum(counts: Iterable[Mapping[str, int]]) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)
    return total


def _one(names: Iterable[Iterable[str]]) -> str | None:
    """All distinct names joined; usually there is one. None when there is none."""
    distinct = sorted({name for group in names for name in group})
    return "+".join(distinct) or None
