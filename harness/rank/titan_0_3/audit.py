"""What is really in force, where torchtitan 0.3 differs from other releases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torchtitan.distributed import utils as distributed_utils
from torchtitan.models.common.attention import FlexAttention

from harness.rank import audit
from harness.rank.audit import Happened
from harness.rank.probe import Probe
from harness.rank.titan_0_3.config import BuiltConfig


def write_in_force(trainer: Any, config: BuiltConfig, probe: Probe, happened: Happened) -> None:
    """Gather what every rank sees and write ``in_force.json``. Collective over the world."""
    mine = audit.see(trainer, probe, happened)
    mine["local_batch_size"] = trainer.config.training.local_batch_size
    modules = audit.live_modules(trainer)
    mine["attention"] = sorted(
        {type(m).__name__ for m in modules.values() if isinstance(m, FlexAttention)}
    )
    mine["compiled"] = [name for name, module in modules.items() if _is_compiled(module)]
    mine["tp_styles"] = 0  # torchtitan 0.3 has no Float8 styles of tensor parallelism
    mine["spmd_backends"] = sorted(_backends(mine["mesh_sizes"], probe))
    audit.write_in_force(probe.folder, trainer, probe, mine, config.flat, config.declared)


def _backends(mesh_dims: Iterable[str], probe: Probe) -> set[str]:
    """The SPMD backend, by what it leaves behind; more than one where traces contradict each other.

    By ``partial_dtensor`` FSDP shards over a mesh dimension of torchtitan's own fold, "fsdp"; by
    the others over "dp_shard", or FSDP's fold of that with cp. By ``full_dtensor`` activations are
    DTensors, and so are the logits; by ``spmd_types`` they are plain tensors. What torchtitan's
    code asks while it computes is the third trace.
    """
    found = {distributed_utils.get_spmd_backend()}
    if "fsdp" in mesh_dims:
        found.add("partial_dtensor")
    elif probe.saw_dtensor_logits is not None:  # this rank has the last stage
        found.add("full_dtensor" if probe.saw_dtensor_logits else "spmd_types")
    return found


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None
