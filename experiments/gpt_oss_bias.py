"""GPT-OSS of torchtitan 0.3.0 under tensor parallelism as it should be. See ``models.toml``."""

from __future__ import annotations

import types
from typing import Any

import torch


def divide_bias(trainer: Any) -> None:
    """Let every tensor-parallel rank add its share of an expert's output bias, and no more.

    Torchtitan pull request 4245: with ``spmd_types`` the bias is added once per rank. At the commit
    that mends the forward pass the gradient still passes undivided to the bias, whose gradients are
    summed over the ranks, so it is TP times too large. Here autograd divides both.
    """
    from torchtitan.models.gpt_oss import moe

    degree = trainer.parallel_dims.tp

    def share(bias: torch.Tensor, _degree: int, dtype: torch.dtype) -> torch.Tensor:
        return (bias / degree).to(dtype)

    moe.ScaleBiasForward = types.SimpleNamespace(apply=share)
