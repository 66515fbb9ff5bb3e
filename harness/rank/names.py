"""Canonical parameter names: the same in every run, however the model was wrapped."""

from __future__ import annotations

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that torch.compile, activation checkpointing and FSDP 1 put into names."""


def canonical(name: str) -> str:
    """A fully qualified name without the segments that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
