"""``[cluster]`` of an experiment file and a user's own cluster file, as a ``Cluster``.

As TOML::

    launcher = "slurm"              # default: "local", torchrun on this machine

    [cluster]
    ranks_per_node = 8              # ranks (GPUs) on a full node: the only required key
    partition = "h100"
    account = "lab"
    qos = "long"
    time = "04:00:00"               # of a job, in sbatch's format
    gpus_per_node = true            # request a GPU per rank; default: true without gres, on GPUs
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
    max_jobs = 4                    # at the same time
    requeue = true                  # after node failure and preemption
    checkpoint_every = 100          # steps; a requeued job continues from the last one
    poll_s = 10

    [cluster.kubernetes]            # for launcher = "kubernetes"
    image = "registry.example/torch:2.15"
    claim = "shared"                # PersistentVolumeClaim with the store and the toolchain
    mount = "/shared"               # its path in pods and on this machine
    namespace = "default"
    gpu = "nvidia.com/gpu"          # resource of which a rank gets one
    queue = "lab"                   # of Kueue
    pod = { nodeSelector = { "cloud.google.com/gke-accelerator" = "nvidia-h100-80gb" } }

A user's own file has ``schema = 1`` and the same keys at its top level. Each key of the experiment
replaces the user's.

This module also decides which further options of sbatch and srun a ``[cluster]`` may add. Both read
options with ``getopt_long``, which accepts any prefix of a long option: ``--out=x`` is
``--output=x``. So the prefixes of a refused option are refused too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Cluster, Kubernetes, Launcher
from converge_harness.toml import (
    Name,
    SchemaVersion,
    Table,
    Where,
    is_printable,
    one_of,
    read_toml,
    validate,
)
from converge_harness.trainers import is_of_launcher

DEVICES = ("cuda", "cpu")
WORD = re.compile(r"[!$-&(-\[\]-~]+")
"""Printable ASCII without space, quotes, backslash and ``#``: safe in a ``#SBATCH`` line, in which
sbatch interprets quotes, escapes and comments.
"""
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", re.ASCII)
TIMES = "such as 90 (minutes), 04:00:00, 1-12 (days-hours) or 1-12:30:00"
MEMORY = re.compile(r"\d+[KMGT]?", re.ASCII)
MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+:@=-]*")
DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
DNS_NAMES = "of small letters, digits, dots and dashes, at most 63"
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
ABSOLUTE = re.compile(r"/[^:\n]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_TEXT = 4096
MINIMAL = """
    [cluster]
    ranks_per_node = 8       # GPUs of a node
    partition = "gpu"
    time = "04:00:00"
"""


MINIMAL_KUBERNETES = """
    [cluster]
    ranks_per_node = 8       # GPUs of a pod
    hardware = "H100"
    [cluster.kubernetes]
    image = "registry.example/torch:2.15"
    claim = "shared"
    mount = "/shared"
"""
OF_SLURM = (
    *("partition", "account", "qos", "gres", "constraint", "sbatch", "srun", "container"),
    *("modules", "max_jobs", "requeue"),
)
"""Keys that Kubernetes has no use for."""
ONLY_SLURM: Mapping[str, str] = {
    "container": "use kubernetes.image",
    "gres": "use kubernetes.gpu",
    "max_jobs": "use kubernetes.queue, and the quota of that queue",
    "modules": "put what they load into the image, or load them in prologue",
    "partition": "use kubernetes.pod = { nodeSelector = { … } }",
    "constraint": "use kubernetes.pod = { nodeSelector = { … } }",
}
"""What to use instead."""
OF_CONVERGE: Mapping[str, str] = {
    **dict.fromkeys(("containers", "volumes", "restartPolicy"), "converge sets it"),
    "terminationGracePeriodSeconds": "converge sets it",
    "activeDeadlineSeconds": "use cluster.time",
    **dict.fromkeys(("hostname", "subdomain"), "pods find each other by those that JobSet sets"),
    "hostNetwork": "pods find each other by names that the hosts' network does not have",
}
"""Fields of a pod that may not be set, and why."""


def _shaped(shape: re.Pattern[str], message: str) -> AfterValidator:
    """A validator that accepts texts of this form."""

    def check(value: str) -> str:
        if not shape.fullmatch(value):
            raise PydanticCustomError("shape", "{message}", {"message": message})
        return value

    return AfterValidator(check)


def _is_variable(name: str) -> str:
    if not VARIABLE.fullmatch(name):
        raise PydanticCustomError("variable", "must be the name of an environment variable")
    if is_of_launcher(name) or name.startswith("SLURM_"):
        raise PydanticCustomError("variable", "is set by the launcher or Slurm")
    if name.startswith("converge_"):
        raise PydanticCustomError("variable", "is a variable of the batch script")
    return name


def _starts_a_command(argv: list[str]) -> list[str]:
    if argv and argv[0].startswith("-"):
        raise PydanticCustomError(
            "argv", "must start with a command, such as ['apptainer', 'exec']"
        )
    return argv


def _has_no_newline(line: str) -> str:
    # Tabs are normal in bash; other control characters are not.
    is_printable(line.replace("\t", " "))
    return line


Count = Annotated[int, Field(ge=1, le=65_536)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(is_printable)]
Word = Annotated[
    str,
    Field(min_length=1, max_length=MAX_TEXT),
    _shaped(WORD, "must be one word without spaces, quotes, backslashes and #"),
]


def _is_not_ours(pod: dict[str, Any]) -> dict[str, Any]:
    for key in pod:
        if key in OF_CONVERGE:
            why = {"key": key, "why": OF_CONVERGE[key]}
            raise PydanticCustomError("pod", "must not have {key}: {why}", why)
    try:
        json.dumps(pod, allow_nan=False)
    except (TypeError, ValueError) as problem:  # infinities
        raise PydanticCustomError("pod", "must have JSON values only") from problem
    return pod


class KubernetesTable(Table):
    """``[cluster.kubernetes]``; see ``model.Kubernetes`` for what the keys mean."""

    image: Text
    claim: Annotated[str, _shaped(DNS_NAME, f"must be a name of Kubernetes, {DNS_NAMES}")]
    mount: Annotated[str, _shaped(ABSOLUTE, "must be an absolute path without a colon")]
    namespace: Annotated[
        str, _shaped(NAMESPACE, "must be of small letters, digits and dashes, at most 63")
    ] = "default"
    gpu: Annotated[str, _shaped(RESOURCE, "must be a resource, such as nvidia.com/gpu")] = (
        "nvidia.com/gpu"
    )
    queue: (
        Annotated[str, _shaped(DNS_NAME, f"must be a name of Kubernetes, {DNS_NAMES}")] | None
    ) = None
    pod: Annotated[dict[str, Any], AfterValidator(_is_not_ours)] = Field(default_factory=dict)


class ClusterTable(Table):
    """``[cluster]``. None: not written; see ``model.Cluster`` for what the keys mean."""

    ranks_per_node: Count | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Annotated[str, _shaped(TIME, f"must be a time of sbatch, {TIMES}")] | None = None
    gpus_per_node: bool | None = None
    gres: Word | None = None
    cpus_per_rank: Count | None = None
    memory_per_node: (
        Annotated[str, _shaped(MEMORY, "must be a memory size of sbatch, such as 64G or 512000M")]
        | None
    ) = None
    constraint: Word | None = None
    sbatch: list[Annotated[Text, AfterValidator(check_sbatch)]] | None = None
    srun: list[Annotated[Text, AfterValidator(check_srun)]] | None = None
    container: Annotated[list[Text], AfterValidator(_starts_a_command)] | None = None
    modules: list[Annotated[str, _shaped(MODULE, "must be a module, such as cuda/12.8")]] | None = (
        None
    )
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
    kubernetes: KubernetesTable | None = None


class UserClusterTable(ClusterTable):
    """A user's own cluster file."""

    schema_version: SchemaVersion = Field(alias="schema")


class PlacedCluster(NamedTuple):
    """A cluster, and the place of each of its keys."""

    cluster: Cluster
    where: Where


def cluster_of(
    own: dict[str, Any],
    where: Where,
    user_file: Path | None,
    launcher: Launcher,
    problems: list[Problem],
) -> PlacedCluster | None:
    """The cluster of an experiment; None if anything is wrong with it.

    Args:
        own: ``[cluster]`` of the experiment, empty if there is none.
        where: maps a key of it to its place.
        user_file: the user's own file; keys of the experiment take precedence.
        launcher: Slurm or Kubernetes.
        problems: list to which problems are added, including those of the user's file.
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
                f'is missing: launcher "{launcher}" needs the number of ranks per node; '
                f"add{there}\n{MINIMAL if launcher is Launcher.SLURM else MINIMAL_KUBERNETES}",
            )
        )
        return None

    def placed(key: str) -> str:
        return where(key) if key in own or user_file is None else f"{user_file}: {key}"

    kubernetes = None
    if launcher is Launcher.KUBERNETES:
        kubernetes = _without_slurm(values, placed, problems)
        if len(problems) > before:
            return None
    return PlacedCluster(_cluster({**values, "kubernetes": kubernetes}), placed)


def check_cluster(own: dict[str, Any], where: Where, problems: list[Problem]) -> None:
    """Check a ``[cluster]`` that this run does not need."""
    validate(ClusterTable, own, where, problems)


def _read_user_file(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """The values of the user's file by key."""
    try:
        data = read_toml(path)
    except ConfigError as error:
        problems += error.problems
        return {}
    if isinstance(data.get("cluster"), dict):
        problems.append(
            Problem(
                f"{path}: cluster", "is not a table here", "its keys belong at the top of this file"
            )
        )
        del data["cluster"]
    table = validate(UserClusterTable, data, lambda key: f"{path}: {key}", problems)
    return {} if table is None else _written(table)


def _written(table: ClusterTable) -> dict[str, Any]:
    return table.model_dump(include=table.model_fields_set - {"schema_version"})


def _cluster(values: dict[str, Any]) -> Cluster:
    # A GPU per rank is requested unless the file does so itself or there are none.
    gpus = "gres" not in values and values.get("device") != "cpu"
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Cluster(**{"gpus_per_node": gpus, **values, **lists})


def _without_slurm(
    values: Mapping[str, Any], where: Where, problems: list[Problem]
) -> Kubernetes | None:
    """The table of Kubernetes, if nothing is missing, and nothing is only for Slurm."""
    table = values.get("kubernetes")
    if table is None:
        problems.append(
            Problem(
                where("kubernetes"),
                'is missing: launcher "kubernetes" needs an image, and a claim of which pods and '
                f"this machine have the same files at the same path; add\n{MINIMAL_KUBERNETES}",
            )
        )
    for key in OF_SLURM:
        if key in values:
            hint = ONLY_SLURM.get(key, "leave it out, or use another file with --cluster")
            problems.append(
                Problem(where(key), 'is of Slurm, and the launcher is "kubernetes"', hint)
            )
    if "hardware" not in values:
        problems.append(
            Problem(
                where("hardware"),
                "is missing: on Kubernetes nothing else says on which hardware a run was made",
                'add its name, such as hardware = "H100"',
            )
        )
    return None if table is None else Kubernetes(**{**table, "mount": Path(table["mount"])})


OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?=[= ]|\Z)")
BY_SCRIPT = "the batch script of a job sets it"
BY_DEGREES = "a set's degrees and ranks_per_node decide it"
BY_GPUS = "use gres or gpus_per_node"
BY_HARNESS = "converge submits the jobs itself"
BY_REQUEUE = "use requeue"

SBATCH: Mapping[str, str] = {
    "account": "use account",
    "array": "every set is a separate job",
    "chdir": BY_SCRIPT,
    "cluster": "converge follows the jobs of one cluster, the default of its commands",
    "clusters": "converge follows the jobs of one cluster, the default of its commands",
    "constraint": "use constraint",
    "cpus-per-task": "use cpus_per_rank",
    "dependency": "converge knows what a job needs; max_jobs limits how many run at a time",
    "error": BY_SCRIPT,
    "export": "use environment",
    "export-file": "use environment",
    "gpus": BY_GPUS,
    "gpus-per-node": BY_GPUS,
    "gpus-per-socket": BY_GPUS,
    "gpus-per-task": BY_GPUS,
    "gres": "use gres",
    "help": BY_HARNESS,
    "job-name": "converge finds a job by the name that it gave it",
    "kill-on-invalid-dep": BY_SCRIPT,
    "mem": "use memory_per_node",
    "no-requeue": BY_REQUEUE,
    "nodes": BY_DEGREES,
    "ntasks": BY_DEGREES,
    "ntasks-per-core": BY_DEGREES,
    "ntasks-per-gpu": BY_DEGREES,
    "ntasks-per-node": BY_DEGREES,
    "ntasks-per-socket": BY_DEGREES,
    "open-mode": BY_SCRIPT,
    "output": BY_SCRIPT,
    "parsable": BY_HARNESS,
    "partition": "use partition",
    "qos": "use qos",
    "quiet": BY_HARNESS,
    "requeue": BY_REQUEUE,
    "test-only": BY_HARNESS,
    "time": "use time",
    "usage": BY_HARNESS,
    "verbose": BY_HARNESS,
    "version": BY_HARNESS,
    "wait": BY_HARNESS,
    "wrap": BY_SCRIPT,
}
"""By long option of sbatch, why it is refused."""
SRUN: Mapping[str, str] = {
    **{
        option: why
        for option, why in SBATCH.items()
        if option.startswith(("nodes", "ntasks", "gpus", "gres", "export", "help", "usage"))
    },
    "chdir": BY_SCRIPT,
    "error": "logs stay in the run folder",
    "exact": BY_SCRIPT,
    "het-group": BY_SCRIPT,
    "jobid": BY_SCRIPT,
    "kill-on-bad-exit": BY_SCRIPT,
    "multi-prog": BY_SCRIPT,
    "output": "logs stay in the run folder",
    "overlap": BY_SCRIPT,
    "pty": BY_SCRIPT,
    "relative": BY_SCRIPT,
    "version": BY_HARNESS,
}
"""The same for srun, which starts one agent on every node."""


def check_sbatch(line: str) -> str:
    """Check an option for a ``#SBATCH`` line: ``--exclusive``, ``--mail-type=END``.

    Raises pydantic's errors, which become problems of the file.
    """
    if "#" in line:
        raise PydanticCustomError("option", "must not have a #: sbatch ends the line there")
    if not line.isascii():
        raise PydanticCustomError("option", "must be ASCII")
    if any(word.startswith("-") for word in line.split()[1:]):
        raise PydanticCustomError("option", "must be one option: each gets its own line")
    return _checked(line, SBATCH)


def check_srun(argument: str) -> str:
    """Check an argument of srun: ``--container-image=…``.

    Raises pydantic's errors, which become problems of the file.
    """
    return _checked(argument, SRUN)


def _checked(text: str, refused: Mapping[str, str]) -> str:
    found = OPTION.match(text)
    if found is None:
        raise PydanticCustomError("option", "must be a long option, --name or --name=value")
    name = found[1]
    whole = [name] if name in refused else [each for each in refused if each.startswith(name)]
    if whole:
        raise PydanticCustomError(
            "option",
            "--{option} cannot be set here: {why}",
            {"option": whole[0], "why": refused[whole[0]]},
        )
    return text
