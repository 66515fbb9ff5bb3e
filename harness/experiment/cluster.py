"""``[cluster]`` of an experiment file and a user's own cluster file, as a ``Cluster``.

As TOML::

    launcher = "slurm"              # default: "local", torchrun on this machine

    [cluster]
    ranks_per_node = 8              # ranks (GPUs) on a full node: the only key that must be there
    partition = "h100"
    account = "lab"
    qos = "long"
    time = "04:00:00"               # of a job, as sbatch takes it
    gpus_per_node = true            # ask for a GPU per rank; default: true without gres, on GPUs
    gres = "gpu:h100:8"             # instead of --gpus-per-node
    cpus_per_rank = 12
    memory_per_node = "900G"
    constraint = "ib"
    sbatch = ["--exclusive"]        # further options of sbatch
    srun = ["--container-image=/images/titan.sqsh"]  # further arguments of srun
    container = ["apptainer", "exec", "--nv", "/images/titan.sif"]
    modules = ["cuda/12.8"]
    prologue = ["ulimit -n 65536"]  # bash, before the ranks start
    environment = { NCCL_SOCKET_IFNAME = "ib0" }
    device = "cuda"                 # or "cpu"
    hardware = "H100"               # part of identities; default: partition, gres, constraint
    max_jobs = 4                    # at once
    requeue = true                  # after node failure and preemption
    checkpoint_every = 100          # steps; a requeued job goes on from there
    poll_s = 10

A user's own file has ``schema = 1`` and the same keys at its top. The experiment's keys replace its
keys one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from harness.errors import ConfigError, Problem
from harness.experiment.cluster_options import check_sbatch, check_srun
from harness.experiment.read import read_toml
from harness.experiment.tables import Name, SchemaVersion, Table, is_printable, one_of, validate
from harness.model import Cluster

DEVICES = ("cuda", "cpu")
WORD = re.compile(r"[!$-&(-\[\]-~]+")
"""Printable ASCII without space, quotes, backslash and ``#``: what a ``#SBATCH`` line takes as it
stands (sbatch reads quotes, escapes and comments there)."""
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", re.ASCII)
TIMES = "as 90 (minutes), 04:00:00, 1-12 (days-hours) or 1-12:30:00"
MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII)
MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+:@=-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_TORCHRUN = frozenset(
    {
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
    }
)
MAX_TEXT = 4096
MINIMAL = """
    [cluster]
    ranks_per_node = 8       # GPUs of a node
    partition = "gpu"
    time = "04:00:00"
"""

Where = Callable[[str], str]


def _shaped(shape: re.Pattern[str], message: str) -> AfterValidator:
    """A validator that lets texts of this shape through."""

    def check(value: str) -> str:
        if not shape.fullmatch(value):
            raise PydanticCustomError("shape", "{message}", {"message": message})
        return value

    return AfterValidator(check)


def _is_variable(name: str) -> str:
    if not VARIABLE.fullmatch(name):
        raise PydanticCustomError("variable", "must be the name of an environment variable")
    if name in OF_TORCHRUN or name.startswith("SLURM_"):
        raise PydanticCustomError(
            "variable",
            "is set by {owner}",
            {"owner": "torchrun" if name in OF_TORCHRUN else "Slurm"},
        )
    return name


def _starts_a_command(argv: list[str]) -> list[str]:
    if argv and argv[0].startswith("-"):
        raise PydanticCustomError("argv", "must start with a command, as ['apptainer', 'exec']")
    return argv


def _has_no_newline(line: str) -> str:
    # Tabs are at home in bash; other control characters are not.
    is_printable(line.replace("\t", " "))
    return line


Count = Annotated[int, Field(ge=1, le=65_536)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(is_printable)]
Word = Annotated[
    str,
    Field(min_length=1, max_length=MAX_TEXT),
    _shaped(WORD, "must be one word without spaces, quotes, backslashes and #"),
]


class ClusterTable(Table):
    """``[cluster]``. None: not written; see ``harness.model.Cluster`` for what the keys mean."""

    ranks_per_node: Count | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Annotated[str, _shaped(TIME, f"must be a time of sbatch, {TIMES}")] | None = None
    gpus_per_node: bool | None = None
    gres: Word | None = None
    cpus_per_rank: Count | None = None
    memory_per_node: (
        Annotated[str, _shaped(MEMORY, "must be a memory size of sbatch, as 64G or 512000M")] | None
    ) = None
    constraint: Word | None = None
    sbatch: list[Annotated[Text, AfterValidator(check_sbatch)]] | None = None
    srun: list[Annotated[Text, AfterValidator(check_srun)]] | None = None
    container: Annotated[list[Text], AfterValidator(_starts_a_command)] | None = None
    modules: list[Annotated[str, _shaped(MODULE, "must be a module, as cuda/12.8")]] | None = None
    prologue: (
        list[Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(_has_no_newline)]] | None
    ) = None
    environment: (
        dict[
            Annotated[str, AfterValidator(_is_variable)],
            Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(is_printable)],
        ]
        | None
    ) = None
    device: Annotated[str, one_of(DEVICES)] | None = None
    hardware: Name | None = None
    max_jobs: Count | None = None
    requeue: bool | None = None
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    poll_s: Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)] | None = None


class UserClusterTable(ClusterTable):
    """A user's own cluster file."""

    schema_version: SchemaVersion = Field(alias="schema")


class PlacedCluster(NamedTuple):
    """A cluster, and where each of its keys is written."""

    cluster: Cluster
    where: Where


def cluster_of(
    own: dict[str, Any], where: Where, user_file: Path | None, problems: list[Problem]
) -> PlacedCluster | None:
    """The cluster of an experiment; None when anything is wrong with it.

    Args:
        own: ``[cluster]`` of the experiment, empty where there is none.
        where: from a key of it to its place.
        user_file: the user's own file, whose keys the experiment's replace.
        problems: where problems are collected, those of the user's file included.
    """
    table = validate(ClusterTable, own, where, problems)
    before = len(problems)
    users = _read_user_file(user_file, problems) if user_file is not None else {}
    if table is None or len(problems) > before:
        return None
    values = users | _written(table)
    if "ranks_per_node" not in values:
        there = f", or in {user_file} without its header" if user_file is not None else ""
        problems.append(
            Problem(
                where("ranks_per_node"),
                f'is missing: launcher "slurm" has to know how many ranks fill a node; add{there}\n'
                f"{MINIMAL}",
            )
        )
        return None

    def placed(key: str) -> str:
        return where(key) if key in own or user_file is None else f"{user_file}: {key}"

    return PlacedCluster(_cluster(values), placed)


def check_cluster(own: dict[str, Any], where: Where, problems: list[Problem]) -> None:
    """Add what is wrong with a ``[cluster]`` that this run does not need."""
    validate(ClusterTable, own, where, problems)


def _read_user_file(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """What the user's file says by key."""
    try:
        data = read_toml(path)
    except ConfigError as error:
        problems += error.problems
        return {}
    if isinstance(data.get("cluster"), dict):
        problems.append(
            Problem(
                f"{path}: cluster", "is no table here", "its keys stand at the top of this file"
            )
        )
        del data["cluster"]
    table = validate(UserClusterTable, data, lambda key: f"{path}: {key}", problems)
    return {} if table is None else _written(table)


def _written(table: ClusterTable) -> dict[str, Any]:
    return table.model_dump(include=table.model_fields_set - {"schema_version"})


def _cluster(values: dict[str, Any]) -> Cluster:
    # A GPU per rank is asked for unless the file says it otherwise or there is none.
    gpus = "gres" not in values and values.get("device") != "cpu"
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Cluster(**{"gpus_per_node": gpus, **values, **lists})
