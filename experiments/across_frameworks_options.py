"""What torchtitan does and Megatron-Core has no key for: see ``across_frameworks.toml``."""

from __future__ import annotations

from typing import Any


def decay_norms(trainer: Any) -> None:
    """Weight decay on all parameters, also on the weights of norms.

    Megatron-Core's standard groups have a multiple of 0 for parameters of one dimension
    (``get_standard_config_overrides``).
    """
    for group in trainer.optimizer.param_groups:
        group["wd_mult"] = 1.0
    trainer.schedule.step(0)
