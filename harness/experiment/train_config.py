"""A train config file as a ``TrainConfig``.

Everything in it is torchtitan's own, kept verbatim in the keys of the toolchain's torchtitan, but
for one table of ours::

    [converge]
    module = "llama3"              # torchtitan 0.3: model module and its config function
    config = "llama3_debugmodel"
    [converge.model]               # shape overrides: dim n_layers n_heads n_kv_heads vocab_size,
                                   # head_dim (Qwen 3), moe_hidden_dim num_experts top_k (MoE)
    dim = 64
    [converge.data]                # the project's synthetic corpus instead of torchtitan's dataset
    seed = 1
    vocab_size = 512
    tokens = 400_000
    loader = "converge"            # what reads it: our own; "torchtitan": its stock text loader;
                                   # "streaming": MosaicML Streaming

That of a command trainer holds whatever its program wants; of ours it may have the corpus alone,
and its program is the loader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from harness.errors import ConfigError, Problem
from harness.experiment.paths import find_file
from harness.experiment.read import read_toml
from harness.experiment.tables import Table, one_of, validate
from harness.model import Loader, SyntheticData, TrainConfig


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


class CorpusTable(Table):
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    vocab_size: Annotated[int, Field(ge=1, le=2**24)] = 512
    tokens: Annotated[int, Field(ge=1, le=10**9)] = 400_000


class DataTable(CorpusTable):
    loader: Annotated[str, one_of(Loader)] = Loader.CONVERGE


class ConvergeTable(Table):
    """``[converge]`` of a train config."""

    module: Annotated[str, Field(min_length=1)] | None = None
    config: Annotated[str, Field(min_length=1)] | None = None
    model: ModelShapeTable = ModelShapeTable()
    data: DataTable | None = None


class CommandConvergeTable(Table):
    """``[converge]`` of a command trainer's train config."""

    data: CorpusTable | None = None


def load_train_config(
    written: str, folders: Sequence[Path], asked_at: str, *, of_command: bool = False
) -> TrainConfig:
    """Read a train config.

    Args:
        written: the path as the experiment file writes it.
        folders: where a relative path is looked up, first match wins.
        asked_at: file and dotted key that names it, for the message when it is not there.
        of_command: whether it is a command trainer's.

    Raises:
        ConfigError: it does not exist, is no TOML, or its ``[converge]`` table is wrong.
    """
    path = find_file(written, folders)
    if path is None:
        looked = ", ".join(str(folder) for folder in folders)
        raise ConfigError(
            Problem(asked_at, f"there is no train config {written!r}", f"looked in: {looked}")
        )
    settings = read_toml(path)
    if of_command:
        return command_config(settings, written, f"{path}:")
    ours, problems = _ours(settings, f"{path}:"), list[Problem]()
    table = validate(ConvergeTable, ours, lambda key: f"{path}: converge.{key}", problems)
    if table is None:
        raise ConfigError(problems)
    return TrainConfig(
        path=written,
        settings=settings,
        module=table.module,
        config=table.config,
        model=table.model.model_dump(exclude_none=True),
        data=SyntheticData(**table.data.model_dump(exclude={"loader"})) if table.data else None,
        loader=Loader(table.data.loader) if table.data else Loader.CONVERGE,
    )


def command_config(tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
    """A command trainer's train config, from a file or from the experiment file itself.

    Args:
        tables: as TOML gave them.
        path: what it is called in messages.
        place: what comes before a dotted key in messages.

    Raises:
        ConfigError: its ``[converge]`` table is wrong.
    """
    settings, problems = dict(tables), list[Problem]()
    ours = _ours(settings, place)
    table = validate(CommandConvergeTable, ours, lambda key: f"{place} converge.{key}", problems)
    if table is None:
        raise ConfigError(problems)
    data = SyntheticData(**table.data.model_dump()) if table.data else None
    return TrainConfig(path=path, settings=settings, data=data)


def _ours(settings: dict[str, Any], place: str) -> dict[str, Any]:
    """The table ``[converge]``, taken out of the settings."""
    ours = settings.pop("converge", {})
    if not isinstance(ours, dict):
        raise ConfigError(Problem(f"{place} converge", "must be a table"))
    return ours
