"""What is really in force, where torchtitan 0.3 differs from other releases."""

from __future__ import annotations

from typing import Any

import torch
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
    audit.write_in_force(probe.folder, trainer, probe, mine, config.flat, config.declared)


def _is_compiled(module: torch.nn.Module) -> bool:
    return module._compiled_call_impl is not None
