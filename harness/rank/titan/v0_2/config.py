"""A job as torchtitan 0.2's own JobConfig, built in Python.

The train config is a genuine torchtitan 0.2 job file (``[converge]`` removed). Over its settings
come, in this order, what converge implies (degrees, steps, seed, folders), what the techniques
set, and the test set's own ``set``; the later wins. torchtitan's parser would take the keys
without looking at the types of their values, so they are applied one by one instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from converge_harness.rank.job_checks import (
    loader_problems,
    repeat_problems,
    unknown_fixes,
)
from converge_harness.rank.settings import (
    DATA_TYPE_KEYS,
    KeyProblem,
    SettingError,
    apply_setting,
    flatten,
    news,
)
from converge_harness.rank.titan.common.checkpoints import checkpoint_settings
from converge_harness.rank.titan.common.components import unknown_components
from converge_harness.rank.titan.common.documents import NAME
from converge_harness.rank.titan.v0_2.fixes import FIXES, FLOAT8_TP
from converge_harness.rank.titan.v0_2.float8 import ALIAS, CONVERTER
from converge_harness.run_folder.corpus import documents_of
from converge_harness.run_folder.job import RankJob

_COLLECTIVE_TIMEOUT_S = 3600
"""On a CPU compiling takes minutes and converge watches over progress itself; torchtitan's 100
seconds between steps would kill ranks that share two cores."""

LOADERS = ("converge", "torchtitan")
"""Our own, and torchtitan's stock text loader."""

_TECHNIQUES = ("compile", "async_tp", "float8", "float8_rowwise", "float8_tp", "bf16")


@dataclass(frozen=True, slots=True)
class Built:
    """A JobConfig and where it came from."""

    config: Any
    """``torchtitan.config.JobConfig``."""
    declared: tuple[str, ...]
    """Keys that parallelism, techniques, ``set`` or converge itself set for this job."""
    new_keys: tuple[str, ...] = ()
    """Keys of the job's overrides that give the config another value than it had."""


def build_config(job: RankJob) -> Built:
    """The job's config; starts nothing and prints nothing.

    Raises SettingError with every problem of its keys.
    """
    from torchtitan.config import JobConfig

    config = JobConfig()
    problems = [*_unknown_names(job), *repeat_problems(job), *loader_problems(job, LOADERS)]
    first = [*_implied(job), *_from_techniques(job)]
    problems += _apply(config, (*flatten(job.train_config.settings), *first))
    new_keys = news(config, job.overrides)
    problems += _apply(config, job.overrides.items())
    declared = dict.fromkeys((*(key for key, _ in first), *job.overrides))
    problems += unknown_components(config)
    problems += _model_problems(job, config)
    if problems:
        raise SettingError(*problems)
    return Built(config, tuple(declared), new_keys)


def _apply(config: Any, settings: Iterable[tuple[str, Any]]) -> Iterator[KeyProblem]:
    for key, value in settings:
        try:
            apply_setting(config, key, value)
        except SettingError as error:
            yield error.problem


def flat_config(config: Any) -> dict[str, Any]:
    """The config by dotted keys."""
    return dict(flatten(config.to_dict()))


def _implied(job: RankJob) -> Iterator[tuple[str, Any]]:
    """What converge sets in every job."""
    degrees = job.parallelism
    yield "parallelism.data_parallel_replicate_degree", degrees.dp_replicate
    yield "parallelism.data_parallel_shard_degree", degrees.dp_shard
    yield "parallelism.tensor_parallel_degree", degrees.tp
    yield "parallelism.context_parallel_degree", degrees.cp
    yield "parallelism.pipeline_parallel_degree", degrees.pp
    yield "parallelism.expert_parallel_degree", degrees.ep
    if job.pipeline_schedule is not None:
        yield "parallelism.pipeline_parallel_schedule", job.pipeline_schedule
    if job.cp_rotation is not None:
        yield "parallelism.context_parallel_rotate_method", job.cp_rotation
    yield "training.steps", job.steps
    yield "debug.seed", job.seed
    yield "debug.deterministic", job.deterministic
    yield "job.dump_folder", str(job.run_folder)
    yield "metrics.log_freq", 1
    yield "metrics.disable_color_printing", True
    if job.data_folder is not None:
        yield "model.hf_assets_path", str(job.data_folder)
        if job.train_config.loader == "torchtitan":
            yield "training.dataset", NAME
            yield "training.dataset_path", str(documents_of(job.data_folder))
    if job.device == "cpu":
        yield "comm.init_timeout_seconds", _COLLECTIVE_TIMEOUT_S
        yield "comm.train_timeout_seconds", _COLLECTIVE_TIMEOUT_S
    yield from checkpoint_settings(job)


def _from_techniques(job: RankJob) -> Iterator[tuple[str, Any]]:
    """What the named techniques set. A seed checkpoint is made without any of them."""
    if job.makes_seed_checkpoint:
        return
    techniques = job.techniques
    if "compile" in techniques:
        yield "compile.enable", True
    if "async_tp" in techniques:
        yield "parallelism.enable_async_tensor_parallel", True
    if {"float8", "float8_rowwise", "float8_tp"} & set(techniques):
        # Without the fix there is no way to ask for the TP styles: the only name the registry
        # takes is one that llama3 does not look for.
        styles = "float8_tp" in techniques and FLOAT8_TP not in job.without_fixes
        yield "model.converters", [ALIAS if styles else CONVERTER]
        # The output projection stays in high precision, as in torchtitan's own configs.
        yield "quantize.linear.float8.filter_fqns", ["output"]
    if "float8_rowwise" in techniques:
        yield "quantize.linear.float8.recipe_name", "rowwise"
    if "bf16" in techniques:
        # The second key, or FSDP would cast the parameters up again to compute.
        yield from dict.fromkeys(DATA_TYPE_KEYS, "bfloat16").items()


def _unknown_names(job: RankJob) -> list[KeyProblem]:
    techniques = [
        KeyProblem("techniques", f"torchtitan 0.2 has no technique {name!r} here", _TECHNIQUES)
        for name in job.techniques
        if name not in _TECHNIQUES
    ]
    return unknown_fixes(job, FIXES) + techniques


def _model_problems(job: RankJob, config: Any) -> list[KeyProblem]:
    """Whether torchtitan has the model and flavor, and the shape fits the model's arguments."""
    from torchtitan.protocols.train_spec import get_train_spec

    try:
        spec = get_train_spec(config.model.name)
    except ValueError:
        from torchtitan.models import _supported_models

        message = f"torchtitan has no model {config.model.name!r}"
        return [KeyProblem("model.name", message, tuple(sorted(_supported_models)))]
    flavors: Mapping[str, Any] = spec.model_args
    if config.model.flavor not in flavors:
        message = f"{config.model.name} has no flavor {config.model.flavor!r}"
        return [KeyProblem("model.flavor", message, tuple(sorted(flavors)))]
    base = flavors[config.model.flavor]
    known = tuple(field.name for field in dataclasses.fields(base))
    return [
        KeyProblem(f"converge.model.{key}", f"{config.model.name} has no {key!r}", known)
        for key in job.train_config.model
        if key not in known
    ]
