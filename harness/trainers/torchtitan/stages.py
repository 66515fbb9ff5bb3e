"""How torchtitan cuts a model into pipeline stages (``distributed/pipeline_parallel.py``)."""

from __future__ import annotations

from collections.abc import Iterator

from converge_harness.model import Job

SINGLE_STAGE_SCHEDULES = frozenset({"1F1B", "GPipe"})
"""Pipeline schedules with one stage per rank; torchtitan gives every other schedule two."""


def layers_to_cut(job: Job) -> int | None:
    """Layers that are split into stages, ends included; None if unknown."""
    layers = job.spec.train_config.model.get("n_layers")
    return None if layers is None else layers + sum(_less_layers(job))


def pipeline_stages(job: Job) -> int:
    """How many stages the model is cut into."""
    per_stage = job.spec.setting("parallelism.pipeline_parallel_layers_per_stage")
    layers = layers_to_cut(job)
    if isinstance(per_stage, int) and per_stage > 0 and layers is not None:
        return -(-layers // per_stage)
    ranks = job.spec.parallelism.pp
    return ranks if job.spec.pipeline_schedule in SINGLE_STAGE_SCHEDULES else 2 * ranks


def _less_layers(job: Job) -> Iterator[int]:
    for end in ("first", "last"):
        less = job.spec.setting(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1)
        yield less if isinstance(less, int) else 1
