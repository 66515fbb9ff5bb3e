"""What is really in force, where torchtitan 0.3 and its main branch differ from other releases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import spmd_types
import torch
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common.attention import FlexAttention

from converge_harness.rank.recorder.step_recorder import StepRecorder
from converge_harness.rank.titan.common import audit
from converge_harness.rank.titan.common.audit import Happened
from converge_harness.rank.titan.v0_3.config import BuiltConfig
from converge_harness.rank.titan.v0_3.sizes import sizes_of


def write_in_force(
    trainer: Any, config: BuiltConfig, recorder: StepRecorder, happened: Happened
) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world."""
    mine = audit.see(trainer, recorder, happened)
    mine["local_batch_size"] = sizes_of(trainer.config).local
    modules = audit.live_modules(trainer)
    mine["attention"] = sorted(
        {type(m).__name__ for m in modules.values() if isinstance(m, FlexAttention)}
    )
    mine["compiled"] = [name for name, module in modules.items() if _is_compiled(module)]
    mine["tp_styles"] = 0  # torchtitan 0.3 has no Float8 styles of tensor parallelism
    if happened.rotation is not None and any(map(_gathers_keys, modules.values())):
        mine["rotations"] = sorted({*mine["rotations"], "allgather"})
    mine["spmd_backends"] = sorted(_backends(trainer, mine["mesh_sizes"], recorder))
    audit.write_in_force(recorder.folder, trainer, recorder, mine, config.flat, config.declared)


def _backends(trainer: Any, mesh_dims: Iterable[str], recorder: StepRecorder) -> set[str]:
    """The SPMD backend, by what it leaves behind; more than one where traces contradict each other.

    By ``partial_dtensor`` FSDP shards over a mesh dimension of torchtitan's own fold, "fsdp"; by
    the others over "dp_shard", or FSDP's fold of that with cp. By ``full_dtensor`` activations are
    DTensors, and so are the logits; by ``spmd_types`` they are plain tensors. What torchtitan's
    code asks while it computes is the third trace, and the only one of a model that somebody else's
    code distributes: it may shard as it likes by any backend.
    """
    found = {distributed_utils.get_spmd_backend()}
    distributes = getattr(trainer.config.model_spec.parallelize_fn, "__module__", None) or ""
    if distributes.partition(".")[0] != "torchtitan":
        return found
    if "fsdp" in mesh_dims:
        found.add("partial_dtensor")
    elif recorder.saw_dtensor_logits is not None:  # this rank has the last stage
        found.add("full_dtensor" if recorder.saw_dtensor_logits else "spmd_types")
    return found


def _gathers_keys(module: torch.nn.Module) -> bool:
    """Whether an attention was built so that its inputs are redistributed from shards over cp.

    So ``spmd_types`` and ``full_dtensor`` gather keys and values, with no operator of its own that
    could be counted.
    """
    config = getattr(module, "_sharding_config", None)
    if not isinstance(module, FlexAttention) or config is None or not module._parallelized:
        return False
    before, after = config.in_src_shardings or {}, config.in_dst_shardings or {}
    return any(
        _over_cp(before[name]) and not _over_cp(after[name])
        for name in before.keys() & after.keys()
    )


def _over_cp(layout: Any) -> bool:
    """Whether a layout shards some dimension over context-parallel ranks."""
    types = layout.per_axis_spmd_types() if layout is not None else {}
    return any(
        axis.value == "cp" and isinstance(kind, spmd_types.Shard) for axis, kind in types.items()
    )


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None
