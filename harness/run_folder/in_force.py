"""``in_force.json``: what was really in force, as ranks observed it after the first step.

The ``…Document`` types are the file as written, key by key: a key may be missing or null.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from converge_harness.run_folder.documents import SCHEMA, write_json
from converge_harness.run_folder.layout import IN_FORCE
from converge_harness.run_folder.shapes import (
    COUNT,
    COUNTS,
    COUNTS_SEEN,
    FLAG,
    NAMES,
    OBJECT,
    OBJECTS,
    TEXT,
    TEXTS,
    Shape,
    misfit,
)

BEFORE_CLIPPING = "before clipping"
AT_THE_STEP = "at the optimizer's step"
"""Where a probe took the gradients; those at the optimizer's step may have been clipped."""


class Float8InForceDocument(TypedDict, total=False):
    """Float8 layers, over all ranks."""

    modules: int
    recipe: str | None
    emulated: bool
    tp_styles: int


class CompileInForceDocument(TypedDict, total=False):
    """What ``torch.compile`` did, over all pipeline stages."""

    regions: int
    graphs: int


class AsyncTpInForceDocument(TypedDict, total=False):
    """Nodes into which async TP fused, by operator, over all pipeline stages."""

    fused_nodes: dict[str, int]


class OwnTechniqueInForceDocument(TypedDict, total=False):
    """What ranks saw of a technique of the experiment file."""

    name: str
    called: bool
    changed: bool
    count: int | None
    modules: list[str]


class ProbeDocument(TypedDict, total=False):
    """How the probe of a user's program was used."""

    wrapping: str
    gradients: str
    recomputes_loss: bool
    switched_off: list[str]


class InForceDocument(TypedDict, total=False):
    """The file, without its schema."""

    world_size: int
    degrees: Mapping[str, int | None]
    seq_len: int | None
    local_batch_size: int | None
    global_batch_size: int | None
    gradient_accumulation_steps: int | None
    pipeline_schedule: str | None
    pipeline_microbatches: int | None
    param_dtype: str | None
    param_dtypes: dict[str, list[str]]
    mixed_precision_param: str | None
    float8: Float8InForceDocument
    compile: CompileInForceDocument
    async_tp: AsyncTpInForceDocument
    attention: str | None
    cp_rotation: str | None
    spmd_backend: str | None
    without_fixes: list[str]
    injected: str | None
    own_techniques: list[OwnTechniqueInForceDocument]
    config: dict[str, Any]
    declared: list[str]
    probe: ProbeDocument


_OF_A_TECHNIQUE: Mapping[str, Shape] = {
    "name": TEXT,
    "called": FLAG,
    "changed": FLAG,
    "count": COUNT,
    "modules": TEXTS,
}


def _are_techniques(value: object) -> bool:
    fits = OBJECTS[0](value)
    return fits and not any(misfit(each, _OF_A_TECHNIQUE) for each in cast("list[Any]", value))


SHAPES: Mapping[str, Shape] = {
    "world_size": COUNT,
    "degrees": COUNTS_SEEN,
    "seq_len": COUNT,
    "local_batch_size": COUNT,
    "global_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "pipeline_schedule": TEXT,
    "pipeline_microbatches": COUNT,
    "param_dtype": TEXT,
    "param_dtypes": NAMES,
    "mixed_precision_param": TEXT,
    "float8": OBJECT,
    "float8.modules": COUNT,
    "float8.recipe": TEXT,
    "float8.emulated": FLAG,
    "float8.tp_styles": COUNT,
    "compile": OBJECT,
    "compile.regions": COUNT,
    "compile.graphs": COUNT,
    "async_tp": OBJECT,
    "async_tp.fused_nodes": COUNTS,
    "attention": TEXT,
    "cp_rotation": TEXT,
    "spmd_backend": TEXT,
    "without_fixes": TEXTS,
    "injected": TEXT,
    "own_techniques": (
        _are_techniques,
        "a list of JSON objects (called and changed are true or false, count is a count)",
    ),
    "config": OBJECT,
    "declared": TEXTS,
    "probe": OBJECT,
    "probe.wrapping": TEXT,
    "probe.gradients": TEXT,
    "probe.recomputes_loss": FLAG,
    "probe.switched_off": TEXTS,
}
"""Types of the values, by dotted keys."""


def write_in_force(folder: Path, values: InForceDocument) -> None:
    """Write the file of a run or pass."""
    write_json(folder / IN_FORCE, {"schema": SCHEMA, **values})


def param_dtypes(types: Mapping[str, list[str]]) -> tuple[str | None, dict[str, list[str]]]:
    """``param_dtype`` and ``param_dtypes``; names by type only if there are several types."""
    return "+".join(types) or None, dict(types) if len(types) > 1 else {}
