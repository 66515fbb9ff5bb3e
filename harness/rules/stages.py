"""Pipeline stages and microbatches, counted as torchtitan counts them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.model import Job

SINGLE_STAGE_SCHEDULES = frozenset({"1F1B", "GPipe"})
"""Pipeline schedules with one stage a rank; torchtitan gives every other schedule two."""


def effective_layers(job: Job) -> int | None:
    """Layers that torchtitan spreads over stages, the ends counted as layers; None if unknown."""
    layers = job.spec.train_config.model.get("n_layers")
    return None if layers is None else layers + sum(_less_layers(job))


def pipeline_stages(job: Job) -> int:
    """How many stages torchtitan cuts the model into (``distributed/pipeline_parallel.py``)."""
    per_stage = job.spec.setting("parallelism.pipeline_parallel_layers_per_stage")
    layers = effective_layers(job)
    if isinstance(per_stage, int) and per_stage > 0 and layers is not None:
        return -(-layers // per_stage)
    ranks = job.spec.parallelism.pp
    return ranks if job.spec.pipeline_schedule in SINGLE_STAGE_SCHEDULES else 2 * ranks


def _less_layers(job: Job) -> Iterator[int]:
    for end in ("first", "last"):
        less = job.spec.setting(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1)
        yield less if isinstance(less, int) else 1


def microbatch_size(job: Job) -> int:
    size = job.spec.setting("parallelism.pipeline_parallel_microbatch_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def count_microbatches(job: Job) -> int:
    return job.local_batch_size // microbatch_size(job)
