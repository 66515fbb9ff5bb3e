"""``[trainer]`` of an experiment file: the keys that all trainers share, and their meaning.

Each trainer has its own table, a subclass of ``TrainerTable``, or of ``InlineTable`` if the train
config may be in the experiment file itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import DEFAULT_TRAINER, SyntheticData, TrainConfig, TrainerSpec
from converge_harness.toml import FilePath, Seconds, Table, ToolchainName, validate


class TrainerTable(Table):
    """Keys of ``[trainer]`` for all trainers."""

    kind: str = DEFAULT_TRAINER
    train_config: FilePath | None = None
    toolchain: ToolchainName | None = None
    startup_timeout_s: Seconds = 600.0
    progress_timeout_s: Seconds = 300.0
    cpu_ranks: Annotated[int, Field(ge=1, le=65_536)] | None = None
    overrides: dict[str, Any] = Field(default={}, alias="set")


class InlineTable(TrainerTable):
    """For trainers whose train config may be a table ``[trainer.config]``."""

    config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrainerOfFile:
    """``[trainer]``, for all sets of a file."""

    trainer: TrainerSpec
    toolchain: str
    """Train config of sets that name none, and whose control names none."""
    spmd_backend: str | None = None
    """The same."""
    seed_checkpoint: Path | None = None
    """Absolute path of the checkpoint from which all sets start, if the file names one."""
    names_weights: bool = False
    """Whether the file names one, even if it does not exist."""
    tokens_per_gpu_second: float | None = None
    deterministic: bool = True
    """Whether all sets train with deterministic algorithms only."""


class CorpusTable(Table):
    """``[converge.data]`` of a train config: the project's synthetic corpus."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    vocab_size: Annotated[int, Field(ge=1, le=2**24)] = 512
    tokens: Annotated[int, Field(ge=1, le=10**9)] = 400_000


class _PlainConvergeTable(Table):
    """``[converge]`` of a train config with arbitrary other tables."""

    data: CorpusTable | None = None


def plain_train_config(tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
    """A train config that the program itself reads; only ``[converge.data]`` is ours.

    Args:
        tables: as TOML gave them.
        path: what it is called in messages.
        place: what comes before a dotted key in messages.

    Raises:
        ConfigError: its ``[converge]`` table is wrong.
    """
    settings, problems = dict(tables), list[Problem]()
    ours = taken_out(settings, place)
    table = validate(_PlainConvergeTable, ours, lambda key: f"{place} converge.{key}", problems)
    if table is None:
        raise ConfigError(problems)
    data = SyntheticData(**table.data.model_dump()) if table.data else None
    return TrainConfig(path=path, settings=settings, data=data)


def taken_out(settings: dict[str, Any], place: str) -> dict[str, Any]:
    """The table ``[converge]``, which is removed from the settings."""
    ours = settings.pop("converge", {})
    if not isinstance(ours, dict):
        raise ConfigError(Problem(f"{place} converge", "must be a table"))
    return ours
