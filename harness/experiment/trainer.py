"""``[trainer]``: what trains the sets, torchtitan or any program.

A program (docs/any-trainer.md)::

    [trainer]
    kind = "command"                # default: "torchtitan"
    command = ["train.py", "--steps", "{steps}", "--stage", "{config.zero.stage}"]
    launcher = "torchrun"           # the default; composer, deepspeed, mpirun, none
    toolchain = "deepspeed-0.19.8"  # or python = "env/bin/python"; default: `python` on PATH
    probe = true                    # the default: the program calls harness.probe
    curves = "{output}/loss.csv"    # where probe = false
    columns = { loss = "train/loss", step = "iteration" }
    files = ["src/model.py"]        # further files whose bytes count to the identity
    environment = { FLAG = "{config.flag}" }
    [trainer.config]                # or train_config = "x.toml"
    training = { steps = 20, local_batch_size = 2, global_batch_size = 8 }
    zero = { stage = 0 }
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from harness.errors import Problem
from harness.experiment.tables import (
    FilePath,
    Seconds,
    SpmdBackend,
    Table,
    ToolchainName,
    one_of,
    validate,
)
from harness.model import DEFAULT_TRAINER, RankLauncher

KINDS = (DEFAULT_TRAINER, "command")
DEFAULT_TOOLCHAIN = "torchtitan-0.3.0"
CURVE_COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens")
"""What can be named in a curve that a program leaves."""
MAX_TEXT = 4096
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"CONVERGE_.*|CUDA_VISIBLE_DEVICES|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)

Where = Callable[[str], str]


def _is_variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise PydanticCustomError("variable", "must be the name of an environment variable")
    if _RESERVED.fullmatch(name):
        raise PydanticCustomError("variable", "is set by the harness or its launcher")
    return name


def _is_argument(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("argument", "must hold no NUL")
    return text


Template = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_is_argument)]
Column = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


class TrainerTable(Table):
    """What ``[trainer]`` holds whatever trains."""

    kind: Annotated[str, one_of(KINDS)] = DEFAULT_TRAINER
    train_config: FilePath | None = None
    toolchain: ToolchainName | None = None
    startup_timeout_s: Seconds = 600.0
    progress_timeout_s: Seconds = 300.0
    cpu_ranks: Annotated[int, Field(ge=1, le=65_536)] | None = None
    overrides: dict[str, Any] = Field(default={}, alias="set")


class TitanTable(TrainerTable):
    """``kind = "torchtitan"``."""

    toolchain: ToolchainName = DEFAULT_TOOLCHAIN
    spmd_backend: SpmdBackend | None = None
    seed_checkpoint: FilePath | None = None
    tokens_per_gpu_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class CommandTable(TrainerTable):
    """``kind = "command"``. What templates mean is up to ``harness/experiment/command.py``."""

    kind: Annotated[str, one_of(KINDS)] = "command"
    command: list[Template] = Field(default=[])
    launcher: Annotated[str, one_of(RankLauncher)] = RankLauncher.TORCHRUN
    python: FilePath | None = None
    probe: bool = True
    curves: Template | None = None
    columns: dict[Annotated[str, one_of(CURVE_COLUMNS)], Column] = Field(default={})
    files: list[FilePath] = Field(default=[])
    environment: dict[Annotated[str, AfterValidator(_is_variable)], Template] = Field(default={})
    config: dict[str, Any] | None = None


TABLES: dict[str, type[TitanTable | CommandTable]] = {
    DEFAULT_TRAINER: TitanTable,
    "command": CommandTable,
}
KEYS = {
    kind: {field.alias or name for name, field in model.model_fields.items()}
    for kind, model in TABLES.items()
}


class _KindOnly(Table):
    model_config = ConfigDict(extra="ignore")

    kind: Annotated[str, one_of(KINDS)] = DEFAULT_TRAINER


def read_trainer(
    table: dict[str, Any], where: Where, problems: list[Problem]
) -> TitanTable | CommandTable:
    """``[trainer]`` as the table of its kind, or what of it is right.

    So the sets can be looked at all the same; what is wrong is added to ``problems``.
    """
    only = validate(_KindOnly, table, where, problems)
    if only is None:
        return TitanTable()
    kind = only.kind
    (other,) = set(TABLES) - {kind}
    foreign = (KEYS[other] - KEYS[kind]) & table.keys()
    problems += [
        Problem(
            where(key),
            f"is a key of kind {other!r}; this trainer is of kind {kind!r}",
            f'add kind = "{other}"' if kind == DEFAULT_TRAINER else "leave it out",
        )
        for key in sorted(foreign)
    ]
    rest = {key: value for key, value in table.items() if key not in foreign}
    model = TABLES[kind]
    right = validate(model, rest, where, problems)
    if right is None:
        sound = {key: value for key, value in rest.items() if _fits(model, key, value)}
        right = model.model_validate(sound)
    return right


def _fits(model: type[TitanTable | CommandTable], key: str, value: object) -> bool:
    return validate(model, {key: value}, str, []) is not None
