"""GPT-OSS of torchtitan 0.3.0 under tensor parallelism as it should be. See ``models.toml``."""

from __future__ import annotations

import types
from typing import Any

import torch


def divide_bias(trainer: Any) -> None:
    """Let every tensor-parallel rank add its share of an expert's output bias, and no more.

    Torchtitan pull request 4245: with ``spmd_types`` the whole bias is added on every rank. That
    pull request divides it in the forward pass alone. Its gradients are summed over the ranks, so
    they become TP times too large. Here autograd divides both.
    """
    from torchtitan.models.gpt_oss import moe

    # Not the one that is passed: it is read from DTensors, which weights of spmd_types are not.
    degree = trainer.parallel_dims.tp

    def share(bias: torch.Tensor, _degree: int, dtype: torch.dtype) -> torch.Tensor:
        return (bias / degree).to(dtype)

    moe.ScaleBiasForward = types.SimpleNamespace(apply=share)
