"""A job as torchtitan's own ``Trainer.Config``.

torchtitan 0.3 has no job files, and its command line is frozen and about to go: a config is a
Python function. So one is called, and what the train config, the job and the experiment say is
set on the dataclasses it returns, in this order (later wins): base config function, model shape,
``settings`` of the train config, what converge implies, techniques, the experiment's ``set``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

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
from converge_harness.rank.titan.v0_3.attention import replace_transformers_attention
from converge_harness.rank.titan.v0_3.base_config import base_config
from converge_harness.rank.titan.v0_3.loaders import LOADERS, SampleLoader, loader_config
from converge_harness.rank.titan.v0_3.series import CUDA_GRAPHS, SERIES
from converge_harness.rank.titan.v0_3.shape import reshape_model, use_dense_attention, use_float8
from converge_harness.rank.titan.v0_3.sizes import (
    apart,
    by_shared_keys,
    changed,
    news_of,
    put,
    sizes_of,
)
from converge_harness.run_folder.job import Degrees, RankJob

_CHECKPOINTING = {"none": None, "full": FullAC, "selective": SelectiveAC}
_CHECKPOINTING_TABLE = "activation_checkpoint"
_CHECKPOINTING_KEY = f"{_CHECKPOINTING_TABLE}.mode"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class BuiltConfig:
    """torchtitan's config of a job."""

    trainer: Any
    """A ``torchtitan.trainer.Trainer.Config``."""
    flat: Mapping[str, Any]
    """Every value by dotted key, as it was before the trainer filled in what it derives."""
    declared: tuple[str, ...]
    """The keys of ``flat`` that the job itself set: where the configs of two jobs may differ."""
    new_keys: tuple[str, ...] = ()
    """Keys of the job's overrides that give the config another value than it had."""


def build_config(job: RankJob) -> BuiltConfig:
    """Raises SettingError when torchtitan does not take what the job says."""
    base = base_config(job)
    config = base.trainer
    # This dialect repairs no upstream bug, so there is no fix that a job could leave out.
    _refuse(
        [
            *unknown_fixes(job, known=()),
            *repeat_problems(job),
            *loader_problems(job, LOADERS),
        ]
    )
    config.model_spec = reshape_model(config.model_spec, job.train_config.model, base.module)
    _tell_loss_the_vocabulary(config)
    if job.device == "cpu":
        use_dense_attention(config.model_spec.model)
        replace_transformers_attention()
    settings, said = apart(flatten(job.train_config.settings))
    sizes = changed(sizes_of(config), said)
    _apply_all(config, settings)
    declared = _apply_all(config, [*_implied(job), *_techniques(job)])
    declared += _use_float8(config, job)
    declared += _use_corpus(config, job)
    settings, said = apart(job.overrides.items())
    new_keys = (*news(config, dict(settings)), *news_of(sizes, said))
    declared += [*_apply_all(config, settings), *said]
    put(config, changed(sizes, said))
    if isinstance(config.dataloader, SampleLoader.Config):
        config.dataloader.global_batch_size = sizes_of(config).whole
    _refuse([*unknown_components(config), *_backend_problems(config, job)])
    _validate(config)
    flat = flat_config(config)
    # The mode chooses another class, with keys of its own.
    parts = [_CHECKPOINTING_TABLE if key == _CHECKPOINTING_KEY else key for key in declared]
    keys = tuple(key for key in flat if any(_belongs(key, part) for part in parts))
    return BuiltConfig(config, flat, keys, new_keys)


def flat_config(config: Any) -> dict[str, Any]:
    """The config by dotted keys; functions are named without their addresses."""
    flat = {
        key: _ADDRESS.sub("", value) if isinstance(value, str) else value
        for key, value in flatten(config.to_dict())
    }
    return by_shared_keys(flat, config)


def _implied(job: RankJob) -> Iterable[tuple[str, Any]]:
    """The settings that converge decides for every job."""
    seed = job.makes_seed_checkpoint
    degrees = Degrees() if seed else job.parallelism
    yield "parallelism.data_parallel_replicate_degree", degrees.dp_replicate
    yield "parallelism.data_parallel_shard_degree", degrees.dp_shard
    yield "parallelism.tensor_parallel_degree", degrees.tp
    yield "parallelism.context_parallel_degree", degrees.cp
    yield "parallelism.pipeline_parallel_degree", degrees.pp
    yield "parallelism.expert_parallel_degree", degrees.ep
    if job.pipeline_schedule and not seed:
        yield "parallelism.pipeline_parallel_schedule", job.pipeline_schedule
    if job.spmd_backend:
        yield "parallelism.spmd_backend", job.spmd_backend
    yield "training.steps", job.steps
    if CUDA_GRAPHS and (job.device == "cpu" or degrees.pp > 1):
        yield "training.disable_cuda_graphs", True
    yield "debug.seed", job.seed
    yield "debug.deterministic", job.deterministic
    yield "metrics.log_freq", 1
    yield "dump_folder", str(job.run_folder)
    yield from checkpoint_settings(job)


def _techniques(job: RankJob) -> Iterable[tuple[str, Any]]:
    """Settings that techniques stand for; Float8 is no setting (``use_float8``)."""
    if job.makes_seed_checkpoint:  # weights are shared by all techniques
        return
    known = {"compile", "async_tp", "float8", "float8_rowwise", "bf16"}
    for technique in job.techniques:
        if technique not in known:
            raise SettingError(
                KeyProblem(
                    "techniques",
                    f"{technique!r} does not exist in torchtitan 0.3",
                    tuple(sorted(known)),
                )
            )
    if "compile" in job.techniques:
        yield "compile.enable", True
    if "async_tp" in job.techniques:
        if job.device == "cpu":
            raise SettingError(
                KeyProblem("techniques", "async_tp on a CPU runs in toolchain torchtitan-0.2.2")
            )
        yield "compile.enable_async_tensor_parallel", True
    if "bf16" in job.techniques:
        yield from dict.fromkeys(DATA_TYPE_KEYS, "bfloat16").items()
    if job.cp_rotation not in (None, "allgather"):
        raise SettingError(
            KeyProblem(
                "cp_rotation",
                f"torchtitan 0.3 gathers keys and values, it cannot do {job.cp_rotation!r}",
                ("allgather",),
            )
        )


_SPMD_BACKEND = "parallelism.spmd_backend"
_FIT_FOR_SPMD_TYPES = (2, 15)


def _backend_problems(config: Any, job: RankJob) -> list[KeyProblem]:
    """What an SPMD backend lacks, which torchtitan finds out only while it builds a trainer."""
    parallelism, found = config.parallelism, []
    backend, degree = parallelism.spmd_backend, parallelism.context_parallel_degree
    if degree > 1 and backend not in SERIES.cp_backends:
        message = (
            f"{backend} of torchtitan {SERIES.name} knows no context parallelism (CP {degree})"
        )
        found.append(KeyProblem(_SPMD_BACKEND, message, SERIES.cp_backends))
    if job.spmd_backend == "spmd_types" and not _shards_typed_parameters():
        message = (
            "spmd_types needs FSDP to shard parameters that are plain tensors with a type, which "
            f"torch can since 2.15, and this toolchain has torch {torch.__version__}"
        )
        found.append(KeyProblem(_SPMD_BACKEND, message, ("partial_dtensor",)))
    return found


def _shards_typed_parameters() -> bool:
    """Whether this torch's ``fully_shard`` knows the types of ``spmd_types``.

    Before, it says that "all parameters must be DTensors on the full SPMD mesh". Older than 2.15 is
    asked what it has: a nightly may be between.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return release >= _FIT_FOR_SPMD_TYPES or hasattr(FSDPParam, "_restore_spmd_types")


def _use_float8(config: Any, job: RankJob) -> list[str]:
    wanted = [t for t in job.techniques if t in ("float8", "float8_rowwise")]
    if job.makes_seed_checkpoint or not wanted:
        return []
    config.model_spec = use_float8(
        config.model_spec, wanted[-1], device=job.device, compiled=config.compile.enable
    )
    return ["model_spec.model"]


def _use_corpus(config: Any, job: RankJob) -> list[str]:
    if job.data_folder is None:
        return []
    config.hf_assets_path = str(job.data_folder)
    config.dataloader = loader_config(job, job.data_folder)
    return ["hf_assets_path", "dataloader"]


def _apply_all(config: Any, settings: Iterable[tuple[str, Any]]) -> list[str]:
    """Apply settings and return their keys; one error for all that do not fit."""
    keys: list[str] = []
    problems: list[KeyProblem] = []
    for key, value in settings:
        keys.append(key)
        try:
            _apply(config, key, value)
        except SettingError as error:
            problems += error.problems
    _refuse(problems)
    return keys


def _refuse(problems: Sequence[KeyProblem]) -> None:
    if problems:
        raise SettingError(*problems)


def _apply(config: Any, key: str, value: Any) -> None:
    if key != _CHECKPOINTING_KEY:
        apply_setting(config, key, value)
        return
    # torchtitan picks activation checkpointing by the class of its config, which no dotted key
    # can say; 0.2's key for it is kept.
    if value not in _CHECKPOINTING:
        raise SettingError(
            KeyProblem(key, f"takes no {value!r}", tuple(repr(mode) for mode in _CHECKPOINTING))
        )
    chosen = _CHECKPOINTING[value]
    config.activation_checkpoint = chosen.Config() if chosen else None


def _tell_loss_the_vocabulary(config: Any) -> None:
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        loss = loss.loss_fn
    vocab_size = getattr(config.model_spec.model, "vocab_size", None)
    if hasattr(loss, "global_vocab_size") and vocab_size is not None:
        loss.global_vocab_size = vocab_size


def _validate(config: Any) -> None:
    """Run torchtitan's own checks, which its dataclasses make only while they are built."""
    for table in (
        *(config.training, config.parallelism, config.compile, config.checkpoint),
        config,
    ):
        check = getattr(table, "__post_init__", None)
        if check is None:
            continue
        try:
            check()
        except ValueError as error:
            raise SettingError(KeyProblem("", f"torchtitan refuses the config: {error}")) from error


def _belongs(key: str, part: str) -> bool:
    return key == part or key.startswith((f"{part}.", f"{part}["))
