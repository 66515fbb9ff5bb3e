"""Rewrites of RMSNorm, as a kernel of one's own would be tested: see ``fused_norm.toml``."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

Norm = Callable[[torch.nn.RMSNorm, torch.Tensor], torch.Tensor]


def use_fused_norm(model: torch.nn.Module) -> None:
    """The right rewrite: the same formula as torch's own, written out."""
    _replace(model, _fused_norm)


def use_wrong_norm(model: torch.nn.Module) -> None:
    """A mistake that is easily made: eps is added outside of the root."""
    _replace(model, _norm_with_eps_outside)


def count_fused_norms(trainer: Any) -> int:
    """How many norms of this rank's part of the model a rewrite has computed."""
    modules = [module for part in trainer.model_parts for module in part.modules()]
    return sum(getattr(module, "computed_by_a_rewrite", False) for module in modules)


def _replace(model: torch.nn.Module, norm: Norm) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.forward = types.MethodType(norm, module)  # type: ignore[method-assign]


def _fused_norm(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    self.computed_by_a_rewrite = True
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
    return (wide * scale).type_as(x) * self.weight


def _norm_with_eps_outside(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    self.computed_by_a_rewrite = True
    wide = x.float()
    root = wide.square().mean(-1, keepdim=True).sqrt() + self.eps
    return (wide / root).type_as(x) * self.weight
