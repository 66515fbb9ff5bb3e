"""torchtitan's part of an experiment file: ``[trainer]``, train configs, and checkpoints.

A train config has torchtitan's own keys, unchanged, and one table of converge::

    [converge]
    module = "llama3"              # torchtitan 0.3: model module and its config function
    config = "llama3_debugmodel"   # (docs/own-model.md: a module of one's own)
    [converge.arguments]           # keyword arguments of the config function
    [converge.model]               # shape overrides: dim n_layers n_heads n_kv_heads vocab_size,
                                   # head_dim (Qwen 3), moe_hidden_dim num_experts top_k (MoE)
    dim = 64
    [converge.data]                # the project's synthetic corpus instead of torchtitan's dataset
    seed = 1
    vocab_size = 512
    tokens = 400_000
    loader = "converge"            # our own; or "torchtitan": its stock text loader;
                                   # "streaming": MosaicML Streaming

Most keys of the table ``checkpoint`` are reserved for converge; torchtitan 0.2.2 and 0.3.0 have the
same ones. ``exclude_from_loading`` is free: it leaves out a part of the state, which the checks of
resumed runs then report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import (
    SPMD_BACKEND,
    SPMD_BACKENDS,
    FaultKind,
    Loader,
    SetSpec,
    SyntheticData,
    TrainConfig,
)
from converge_harness.run_folder.layout import CHECKPOINT_METADATA
from converge_harness.toml import (
    Environment,
    FilePath,
    Table,
    Where,
    find,
    flatten,
    one_of,
    validate,
)
from converge_harness.trainers.table import CorpusTable, TrainerTable, taken_out
from converge_harness.trainers.torchtitan.releases import DEFAULT_TOOLCHAIN
from converge_harness.trainers.torchtitan.user_module import config_problems, find_user_module

OWNED = {
    "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.dp_shard",
    "parallelism.tensor_parallel_degree": "parallelism.tp",
    "parallelism.context_parallel_degree": "parallelism.cp",
    "parallelism.context_parallel_rotate_method": "cp_rotation",
    "parallelism.pipeline_parallel_degree": "parallelism.pp",
    "parallelism.pipeline_parallel_schedule": "pipeline_schedule",
    "parallelism.expert_parallel_degree": "parallelism.ep",
    "parallelism.enable_async_tensor_parallel": 'techniques = ["async_tp"]',
    SPMD_BACKEND: "spmd_backend",
    "compile.enable": 'techniques = ["compile"]',
    "compile.enable_async_tensor_parallel": 'techniques = ["async_tp"]',
    "debug.deterministic": "trainer.deterministic",
    "training.deterministic": "trainer.deterministic",
    "debug.seed": "seed",
    "training.seed": "seed",
}
"""Train config keys for which the experiment file has its own key. Setting one of them with ``set``
would contradict what the plan computes from that key.
"""


class TitanTable(TrainerTable):
    """``kind = "torchtitan"``."""

    toolchain: Environment = DEFAULT_TOOLCHAIN
    spmd_backend: Annotated[str, one_of(SPMD_BACKENDS)] | None = None
    seed_checkpoint: FilePath | None = None
    deterministic: bool = True
    tokens_per_gpu_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


# ----------------------------------------------------------- the train config


class ModelShapeTable(Table):
    dim: Annotated[int, Field(ge=1)] | None = None
    n_layers: Annotated[int, Field(ge=1)] | None = None
    n_heads: Annotated[int, Field(ge=1)] | None = None
    n_kv_heads: Annotated[int, Field(ge=1)] | None = None
    head_dim: Annotated[int, Field(ge=1)] | None = None
    moe_hidden_dim: Annotated[int, Field(ge=1)] | None = None
    num_experts: Annotated[int, Field(ge=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    vocab_size: Annotated[int, Field(ge=1)] | None = None


class DataTable(CorpusTable):
    loader: Annotated[str, one_of(Loader)] = Loader.CONVERGE


class ConvergeTable(Table):
    """``[converge]`` of a train config."""

    module: Annotated[str, Field(min_length=1)] | None = None
    config: Annotated[str, Field(min_length=1)] | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    model: ModelShapeTable = ModelShapeTable()
    data: DataTable | None = None


def titan_train_config(tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
    """Torchtitan's own tables, and ours; raises ConfigError if ``[converge]`` is wrong.

    Args:
        tables: as TOML gave them.
        path: name of the train config in messages.
        place: what comes before a dotted key in messages.
    """
    settings, problems = dict(tables), list[Problem]()
    ours = taken_out(settings, place)
    table = validate(ConvergeTable, ours, lambda key: f"{place} converge.{key}", problems)
    if table is None:
        raise ConfigError(problems)
    return TrainConfig(
        path=path,
        settings=settings,
        module=table.module,
        config=table.config,
        arguments=table.arguments,
        model=table.model.model_dump(exclude_none=True),
        data=SyntheticData(**table.data.model_dump(exclude={"loader"})) if table.data else None,
        loader=Loader(table.data.loader) if table.data else Loader.CONVERGE,
    )


def placed_train_config(config: TrainConfig, folders: Sequence[Path], place: str) -> TrainConfig:
    """The config with the folder that its module is imported from, if that is one of these.

    Raises ConfigError if the module's source has no such config function, or the function does not
    take the arguments.
    """
    if config.arguments and config.module is None:
        raise ConfigError(
            Problem(f"{place} converge.arguments", "are of no function", "set converge.module")
        )
    own = find_user_module(config.module, folders) if config.module else None
    if own is None:
        return config
    problems = list(config_problems(own, config.config, config.arguments, place))
    if config.model:
        problems.append(
            Problem(
                f"{place} converge.model",
                f"cannot reshape a model of one's own ({own.file})",
                "give its config function parameters, and set them in [converge.arguments]",
            )
        )
    if problems:
        raise ConfigError(problems)
    return replace(config, import_from=own.folder, code=own.file)


# ---------------------------------------------------------------- checkpoints

SHARDS = "*.distcp"
EXPECTED = f"a distributed checkpoint is a folder with {CHECKPOINT_METADATA} and {SHARDS} shards"
MAX_SHOWN = 8


def find_seed_checkpoint(
    written: str | None,
    folders: Sequence[Path],
    where: Callable[[str], str],
    problems: list[Problem],
) -> Path | None:
    """The checkpoint's absolute path; None if none is named, or it is not a checkpoint.

    Args:
        written: the path as the experiment file writes it.
        folders: where a relative path is looked up, first match wins.
        where: from a key of ``[trainer]`` to its place, for messages.
        problems: where what is wrong is added.
    """
    if written is None:
        return None
    place = where("seed_checkpoint")
    path = find(written, folders)
    if path is None:
        looked = ", ".join(map(str, folders))
        problems.append(Problem(place, f"there is no folder {written!r}", f"looked in: {looked}"))
        return None
    wrong = _wrong_with(path)
    if wrong:
        problems.append(Problem(place, f"{written!r} {wrong}", EXPECTED))
        return None
    return path.resolve()


def _wrong_with(path: Path) -> str:
    """Why a path is not a checkpoint; empty if it is one."""
    if not path.is_dir():
        return "is a file"
    try:
        metadata = path / CHECKPOINT_METADATA
        if not metadata.is_file():
            return f"has no {CHECKPOINT_METADATA}: there is {_content(path)}"
        if not metadata.stat().st_size:
            return f"has an empty {CHECKPOINT_METADATA}: its writing was cut short"
        if not any(path.glob(SHARDS)):
            return f"has no {SHARDS} shard: there is {_content(path)}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def _content(path: Path) -> str:
    names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
    shown = ", ".join(names[:MAX_SHOWN]) or "nothing"
    return f"{shown} and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else shown


def _of_table(*keys: str) -> frozenset[str]:
    return frozenset(f"checkpoint.{key}" for key in keys)


START = _of_table(
    "create_seed_checkpoint",
    "enable",
    "folder",
    "initial_load_in_hf",
    "initial_load_in_hf_quantized",
    "initial_load_model_only",
    "initial_load_path",
    "load_only",
    "load_step",
)
"""What a run starts from. Sets may not change it, because the identity would not cover the
weights.
"""
PASSES = START | _of_table(
    "async_mode",
    "enable_first_step_checkpoint",
    "export_dtype",
    "interval",
    "keep_latest_k",
    "last_save_in_hf",
    "last_save_model_only",
)
"""Keys for the checkpoints between the passes of a run."""
OF_PASSES = (
    "converge writes and loads the checkpoints of elastic and fault sets, and of all sets with "
    "cluster.checkpoint_every"
)
ASYNC_MODE = "checkpoint.async_mode"
ASYNC_MODES = ("disabled", "async")
PINNED_MODE = "async_with_pinned_mem"
UNTRIED = (
    ", which needs an accelerator and writes from another process: converge was never run with it"
)
"""Why that is refused (``torch.distributed.checkpoint.staging.DefaultStager``)."""
WRITES_HALF = frozenset({FaultKind.CKPT_TORN, FaultKind.DISK_FULL})
"""Faults that strike while a checkpoint is written, which has to be in the step itself."""
WHEN = "`until` of segments and checkpoint_every say when"


def start_problems(overrides: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """Problems with settings that would let a set start from other weights than the others."""
    for key in sorted(START & overrides.keys()):
        yield Problem(
            where(f"set.{key}"),
            "cannot be set here: converge decides what a run starts from, the same for all sets",
            "use trainer.seed_checkpoint",
        )


def pass_problems(
    spec: SetSpec, own: Mapping[str, Any], where: Where, where_trainer: Where
) -> Iterator[Problem]:
    """Problems with settings that converge itself uses for a set in several passes.

    Args:
        spec: the set; its overrides include ``[trainer.set]``.
        own: the set's own table ``set``.
        where: maps a key of the set to its place.
        where_trainer: maps a key of ``[trainer]`` to its place.
    """
    mine = {key for key, _ in flatten(dict(own))}
    for key in sorted((PASSES - START) & spec.overrides.keys()):  # START: see start_problems
        place = where if key in mine else where_trainer
        if key == ASYNC_MODE:
            yield from _async_problems(spec, place(f"set.{key}"))
            continue
        yield Problem(place(f"set.{key}"), f"cannot be set here: {OF_PASSES}", WHEN)
    config = spec.train_config
    for key in sorted(PASSES & {key for key, _ in flatten(dict(config.settings))}):
        yield Problem(
            f"{config.path}: {key}",
            f"cannot be set in the train config of such sets: {OF_PASSES}",
            "leave it out, or name a train_config without it in the set",
        )


def _async_problems(spec: SetSpec, place: str) -> Iterator[Problem]:
    mode = spec.overrides[ASYNC_MODE]
    if mode not in ASYNC_MODES:
        why = UNTRIED if mode == PINNED_MODE else ""
        yield Problem(place, f"is {mode!r}{why}", f"use {' or '.join(map(repr, ASYNC_MODES))}")
    faults = spec.recovery.faults if spec.recovery is not None else ()
    struck = sorted({each.kind.value for each in faults if each.kind in WRITES_HALF})
    if mode != ASYNC_MODES[0] and struck:
        yield Problem(
            place,
            f"is {mode!r}, and {' and '.join(struck)} strikes while a step writes its checkpoint",
            "leave one of them out",
        )
