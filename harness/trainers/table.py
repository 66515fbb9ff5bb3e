"""``[trainer]`` of an experiment file: the keys that all trainers share, and their meaning.

Each trainer has its own table, a subclass of ``TrainerTable``, or of ``InlineTable`` if the train
config may be in the experiment file itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import SyntheticData, TrainConfig, TrainerSpec
from converge_harness.toml import (
    Environment,
    FilePath,
    PythonTable,
    Seconds,
    Table,
    Where,
    expanded,
    find_file,
    validate,
)

DEFAULT_TRAINER = "torchtitan"
"""Default of ``[trainer] kind``."""
FOR_ALL_SETS = frozenset(
    {
        *("startup_timeout_s", "progress_timeout_s", "cpu_ranks"),
        *("seed_checkpoint", "tokens_per_gpu_second", "deterministic"),
    }
)
"""Keys that only ``[trainer]`` may have: they are for all sets of a file, whoever trains them."""


class TrainerTable(Table):
    """Keys of ``[trainer]``, or of ``[trainers.NAME]``, for all trainers."""

    kind: str = DEFAULT_TRAINER
    train_config: FilePath | None = None
    toolchain: Environment | None = None
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
    maps_weights: bool = False
    """Whether it says what the seed checkpoint of another trainer calls its parameters."""


def environment_of(
    written: str | PythonTable, where: Where, folders: Sequence[Path], problems: list[Problem]
) -> str:
    """The name of a toolchain, or the absolute path of a Python; what is wrong is added.

    Args:
        written: the value of the key ``toolchain``.
        where: maps a key of the table that has it to its place, for messages.
        folders: where relative paths are resolved; the first match wins.
        problems: list to which problems are added.
    """
    if isinstance(written, str):
        return written
    return python_at(written.python, where("toolchain.python"), folders, problems)


def python_at(written: str, place: str, folders: Sequence[Path], problems: list[Problem]) -> str:
    """The absolute path of a Python; a name without a slash is looked up on ``PATH``."""
    bare = shutil.which(written) if "/" not in written else None
    # Not resolved: the Python of a virtual environment is a link, which identifies the environment.
    path = find_file(written, folders) or (Path(bare) if bare else None)
    if path is None:
        inside = find_file(f"{written}/bin/python", folders)
        looked = "" if expanded(written).is_absolute() else f"looked in: {_listed(folders)}"
        hint = f"did you mean {written}/bin/python?" if inside else looked
        problems.append(Problem(place, f"there is no Python {written!r}", hint))
    elif not os.access(path, os.X_OK):
        problems.append(Problem(place, f"{path} is not executable"))
    found = (path or folders[0] / written).absolute()
    return str(found.parent.resolve() / found.name)


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))


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
