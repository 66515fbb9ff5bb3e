"""``job.json``, ``in_force.json`` and faults of a run folder, with their values' types checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from converge_harness.errors import EvidenceError
from converge_harness.model import (
    CompileInForce,
    Float8InForce,
    InForce,
    OwnTechniqueInForce,
    Probing,
)
from converge_harness.run_folder import faults, in_force, job
from converge_harness.run_folder.in_force import BEFORE_CLIPPING, InForceDocument
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.layout import IN_FORCE, JOB, METRICS_FILES
from converge_harness.run_folder.passes import passes_with_metrics
from converge_harness.run_folder.shapes import Shape, misfit
from converge_harness.store import read_json


def read_job(folder: Path) -> JobDocument | None:
    """``job.json``; None for a folder in which nothing ran.

    Metrics without their job would be judged without any audit, so they raise EvidenceError, as
    does a value of the wrong type. Raises StoreError for a damaged or newer file.
    """
    path = folder / JOB
    if path.is_file():
        return cast("JobDocument", _checked(path, job.SHAPES))
    if any((folder / name).is_file() for name in METRICS_FILES) or passes_with_metrics(folder):
        raise EvidenceError(
            f"{path}: is missing, so it is unknown what this run should have been; copy the whole "
            "run folder, or run the job again"
        )
    return None


def read_fault(path: Path) -> dict[str, Any]:
    """``faults/<index>.json``: a fault that happened; raises what read_job raises."""
    return _checked(path, faults.SHAPES)


def read_in_force(folder: Path) -> InForce | None:
    """``in_force.json``; None if the run ended before. Raises what read_job raises."""
    path = folder / IN_FORCE
    if not path.is_file():
        return None
    return in_force_of(cast("InForceDocument", _checked(path, in_force.SHAPES)))


def in_force_of(document: InForceDocument) -> InForce:
    """The value of a file whose types were checked; missing and null keys are unknown."""
    float8, compiled = document.get("float8") or {}, document.get("compile") or {}
    probe = document.get("probe") or {}
    gradients = probe.get("gradients") or BEFORE_CLIPPING
    return InForce(
        world_size=document.get("world_size"),
        degrees=document.get("degrees") or {},
        seq_len=document.get("seq_len"),
        local_batch_size=document.get("local_batch_size"),
        global_batch_size=document.get("global_batch_size"),
        gradient_accumulation_steps=document.get("gradient_accumulation_steps"),
        pipeline_schedule=document.get("pipeline_schedule"),
        pipeline_microbatches=document.get("pipeline_microbatches"),
        param_dtype=document.get("param_dtype"),
        param_dtypes={
            dtype: tuple(names) for dtype, names in (document.get("param_dtypes") or {}).items()
        },
        mixed_precision_param=document.get("mixed_precision_param"),
        float8=Float8InForce(
            modules=float8.get("modules") or 0,
            recipe=float8.get("recipe"),
            emulated=bool(float8.get("emulated")),
            tp_styles=float8.get("tp_styles") or 0,
        ),
        compile=CompileInForce(
            regions=compiled.get("regions") or 0, graphs=compiled.get("graphs") or 0
        ),
        fused_nodes=(document.get("async_tp") or {}).get("fused_nodes") or {},
        attention=document.get("attention"),
        cp_rotation=document.get("cp_rotation"),
        spmd_backend=document.get("spmd_backend"),
        without_fixes=tuple(document.get("without_fixes") or ()),
        injected=document.get("injected"),
        own_techniques=tuple(
            OwnTechniqueInForce(
                name=str(each.get("name")),
                called=bool(each.get("called")),
                changed=bool(each.get("changed")),
                count=each.get("count"),
                modules=tuple(each.get("modules") or ()),
            )
            for each in document.get("own_techniques") or ()
        ),
        config=document.get("config") or {},
        declared=tuple(document.get("declared") or ()),
        probing=Probing(
            wrapping=probe.get("wrapping") or "",
            late="" if gradients == BEFORE_CLIPPING else gradients,
            recomputes_loss=probe.get("recomputes_loss") is not False,
            switched_off=tuple(probe.get("switched_off") or ()),
        ),
    )


def _checked(path: Path, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The file's object; missing and null keys are left to the judge."""
    document = read_json(path)
    if found := misfit(document, shapes):
        raise EvidenceError(f"{path}: {found}")
    return document
