"""Canonical parameter names: the same in every run, however the model is wrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path segments that torch.compile, activation checkpointing and FSDP 1 add to names."""


def canonical(name: str) -> str:
    """A fully qualified name without the segments that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_by_type(everyone: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """The sorted names by data type, from every rank's mapping of names to data types."""
    found: dict[str, set[str]] = {}
    for mine in everyone:
        for name, dtype in mine.items():
            found.setdefault(dtype, set()).add(name)
    return {dtype: sorted(found[dtype]) for dtype in sorted(found)}
