"""``in_force.json``: what was really in force, as ranks observed it after the first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converge_harness.run_folder.documents import SCHEMA, write_json
from converge_harness.run_folder.layout import IN_FORCE
from converge_harness.run_folder.shapes import (
    COUNT,
    COUNTS,
    COUNTS_SEEN,
    FLAG,
    NAMES,
    OBJECT,
    TEXT,
    TEXTS,
    Shape,
)

SHAPES: Mapping[str, Shape] = {
    "degrees": COUNTS_SEEN,
    "spmd_backend": TEXT,
    "param_dtype": TEXT,
    "param_dtypes": NAMES,
    "mixed_precision_param": TEXT,
    "float8": OBJECT,
    "float8.modules": COUNT,
    "float8.tp_styles": COUNT,
    "compile": OBJECT,
    "compile.regions": COUNT,
    "compile.graphs": COUNT,
    "async_tp": OBJECT,
    "async_tp.fused_nodes": COUNTS,
    "without_fixes": TEXTS,
    "config": OBJECT,
    "declared": TEXTS,
    "probe": OBJECT,
    "probe.wrapping": TEXT,
    "probe.gradients": TEXT,
    "probe.recomputes_loss": FLAG,
}
"""Types of the values that the judge uses."""


def write_in_force(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the file of a run or pass."""
    write_json(folder / IN_FORCE, {"schema": SCHEMA, **values})


def param_dtypes(types: Mapping[str, list[str]]) -> dict[str, Any]:
    """Its keys on parameters' data types; names by type only if there are several types."""
    return {
        "param_dtype": "+".join(types) or None,
        "param_dtypes": dict(types) if len(types) > 1 else {},
    }
