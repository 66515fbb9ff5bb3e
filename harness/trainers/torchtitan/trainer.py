"""torchtitan as a trainer, and how torchrun is called for it.

``tests/trainers`` compares what is built here with golden files.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from signal import SIGUSR1
from typing import Any

from converge_harness.errors import Problem
from converge_harness.model import (
    TORCHTITAN,
    Job,
    RankError,
    Repeat,
    RepeatKind,
    SetSpec,
    Surroundings,
    Technique,
    Toolchain,
    TrainConfig,
    TrainerSpec,
)
from converge_harness.run_folder.layout import JOB, LOGS
from converge_harness.toml import Where
from converge_harness.toolchains.own_python import before
from converge_harness.trainers.base import (
    RANK_MODULE,
    Features,
    Limitation,
    SourceFile,
    Start,
    Trainer,
    job_document,
)
from converge_harness.trainers.calls import Call, Rendezvous, comes_in_passes, first_call, part_of
from converge_harness.trainers.failure import rank_error
from converge_harness.trainers.table import TrainerOfFile, environment_of
from converge_harness.trainers.torchtitan import releases
from converge_harness.trainers.torchtitan.own_python import own_toolchain
from converge_harness.trainers.torchtitan.table import (
    OWNED,
    TitanTable,
    find_seed_checkpoint,
    pass_problems,
    placed_train_config,
    start_problems,
    titan_train_config,
)

AGENT_MODULE = "converge_harness.rank.start.agent"
"""torchrun's agent, which ends with converge."""


class Torchtitan(Trainer):
    """torchtitan under torchrun, with converge's rank code."""

    kind = "torchtitan"
    own_rank_code = True
    stack_signal = SIGUSR1
    table = TitanTable
    own_words = OWNED

    def of_file(
        self, table: TitanTable, where: Where, folders: Sequence[Path], problems: list[Problem]
    ) -> TrainerOfFile:
        return TrainerOfFile(
            trainer=TORCHTITAN,
            toolchain=environment_of(table.toolchain, where, folders, problems),
            spmd_backend=table.spmd_backend,
            seed_checkpoint=find_seed_checkpoint(table.seed_checkpoint, folders, where, problems),
            names_weights=table.seed_checkpoint is not None,
            tokens_per_gpu_second=table.tokens_per_gpu_second,
            deterministic=table.deterministic,
        )

    def train_config(self, tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
        return titan_train_config(tables, path, place)

    def placed(self, config: TrainConfig, folders: Sequence[Path], place: str) -> TrainConfig:
        return placed_train_config(config, folders, place)

    def override_problems(self, overrides: Mapping[str, Any], where: Where) -> Iterable[Problem]:
        return start_problems(overrides, where)

    def pass_problems(
        self, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        return pass_problems(spec, own, where, whole)

    def unmakeable(
        self, repeat: Repeat, trainer: TrainerSpec, controls: Sequence[SetSpec]
    ) -> tuple[str, str]:
        """Only our own loader can distribute a global batch in another order."""
        others = [spec.name for spec in controls if not spec.train_config.own_loader]
        if not others or repeat.kind is not RepeatKind.PERMUTE:
            return "", ""
        why = (
            f"is not possible for {', '.join(map(repr, others))}: its train config has no "
            "[converge.data] for converge's own loader, and only that can distribute the samples "
            "of a batch in another order"
        )
        return why, "leave it out, or use rerun and ulp repeats"

    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        return {}

    def describe(self, spec: SetSpec) -> str:
        return ""

    def sources(self, spec: SetSpec) -> Iterable[SourceFile]:
        config = spec.train_config
        if config.code is not None and config.import_from is not None:
            yield SourceFile(config.code, config.import_from, "train_config")

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        return releases.find_toolchain(name, root)

    def with_code(
        self, toolchain: Toolchain, first: tuple[Path, ...], trainer: TrainerSpec
    ) -> Toolchain:
        return own_toolchain(toolchain.name, first)

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        return releases.assume_toolchain(name, root)

    def release(self, toolchain: Toolchain) -> str | None:
        return toolchain.versions.get("torchtitan")

    def toolchain_for(self, config: TrainConfig | None = None) -> str:
        return releases.toolchain_for(config)

    def features(self, toolchain: Toolchain) -> Features:
        return releases.FEATURES.get(toolchain.dialect, Features())

    def limitations(self, spec: SetSpec, toolchain: Toolchain) -> Iterable[Limitation]:
        return releases.limitations(spec, toolchain.dialect)

    def warnings(self, toolchain: Toolchain, words: set[str]) -> Iterable[str]:
        return releases.warnings(toolchain.dialect, words)

    def job_payload(
        self,
        job: Job,
        folder: Path,
        *,
        data: Path | None,
        seed_checkpoint: Path | None,
        device: str,
    ) -> dict[str, Any]:
        common = job_document(
            job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device
        )
        # Absent where it goes without saying, as in files of older releases.
        return {**common, **({} if job.spec.deterministic else {"deterministic": False})}

    def argv(self, job: Job, folder: Path, start: Start) -> tuple[str, ...]:
        return torchrun_argv(job, folder, start.rank_module, start.call, start.meeting)

    def agent_argv(self, job: Job, folder: Path, start: Start) -> tuple[str, ...]:
        return (
            *(str(start.python or job.toolchain.python), "-m", AGENT_MODULE),
            *torchrun_arguments(
                job, folder, start.rank_module, start.call, start.meeting, start.logs
            ),
        )

    def node_arguments(
        self, job: Job, folder: Path, call: Call, meeting: Rendezvous, rank_module: str
    ) -> tuple[str, ...]:
        return torchrun_node_arguments(job, folder, call, meeting, rank_module)

    def printable(
        self, job: Job, folder: Path, ranks_per_node: int | None, data: Path | None
    ) -> str:
        return printable_command(job, folder, ranks_per_node)

    def is_offline(self, job: Job) -> bool:
        # Our corpus needs no network; torchtitan's own datasets (c4) do.
        return job.spec.train_config.data is not None

    def error(self, logs: Sequence[Path], failed: Sequence[Path], returncode: int) -> RankError:
        return rank_error(*failed)

    def spec_of(self, job: Mapping[str, Any]) -> TrainerSpec:
        return TORCHTITAN

    def data_types(self, job: Mapping[str, Any], ran: Mapping[str, Any]) -> set[str]:
        named = {"bfloat16"} if Technique.BF16 in (job.get("techniques") or ()) else set()
        return named | super().data_types(job, ran)


TRAINER = Torchtitan()


HEAD_NODE = "HEAD_NODE:29500"
"""Rendezvous endpoint in printed commands for several nodes."""


def torchrun_arguments(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
    logs: Path | None = None,
) -> tuple[str, ...]:
    """Arguments of torchrun for one call of a job's run (None: its first) and one of its agents.

    ``logs`` is the folder for the ranks' output; None: the run folder's ``logs``.
    """
    folder = folder.absolute()
    call = call or first_call(job)
    meeting = meeting or Rendezvous()
    return (
        *_agent_arguments(job, call, meeting),
        f"--rdzv-id={meeting.name or job.identity[:12]}",
        f"--max-restarts={call.max_restarts}",
        f"--log-dir={logs or folder / LOGS}",
        "--redirects=3",
        *_rank_arguments(folder, rank_module, call),
    )


def torchrun_node_arguments(
    job: Job, folder: Path, call: Call, meeting: Rendezvous, rank_module: str = RANK_MODULE
) -> tuple[str, ...]:
    """The same for ``rank.start.node``, which adds what nodes and lives of a job differ in.

    That is the rendezvous id, the log folder, and whether the node has the rendezvous store (for
    one node: the file of the rendezvous).
    """
    return (
        *_agent_arguments(job, call, meeting),
        f"--max-restarts={call.max_restarts}",
        "--redirects=3",
        *_rank_arguments(folder.absolute(), rank_module, call),
    )


def _agent_arguments(job: Job, call: Call, meeting: Rendezvous) -> tuple[str, ...]:
    nodes, *where = meeting.arguments()
    ranks = part_of(job, call).world_size // meeting.most
    return (nodes, f"--nproc-per-node={ranks}", *where)


def _rank_arguments(folder: Path, rank_module: str, call: Call) -> tuple[str, ...]:
    return (
        "-m",
        rank_module,
        str(folder / JOB),
        *(() if call.segment is None else ("--segment", str(call.segment))),
    )


def torchrun_argv(
    job: Job,
    folder: Path,
    rank_module: str = RANK_MODULE,
    call: Call | None = None,
    meeting: Rendezvous | None = None,
) -> tuple[str, ...]:
    """A torchrun call of a job, as a user would type it; None: the first."""
    return (*_torchrun(job), *torchrun_arguments(job, folder, rank_module, call, meeting))


def _torchrun(job: Job) -> tuple[str, ...]:
    return (str(job.toolchain.python), "-m", "torch.distributed.run")


def printable_command(job: Job, folder: Path, ranks_per_node: int | None = None) -> str:
    """The torchrun call as one shell line, to be run on every node.

    For a run in several segments, their calls one after another.
    Raises ValueError when the ranks do not fill nodes of that size.

    It needs the run folder's ``job.json``, so it repeats a run that was started before. Its
    environment is in ``record.json``.
    """
    first = first_call(job)
    parts = len(job.spec.segments) if first.segment is not None else 1
    calls = (first, *(Call(number + 1, segment=number) for number in range(1, parts)))
    paths = _first_on_path(job)
    return " && ".join(
        paths
        + shlex.join(
            (
                *_torchrun(job),
                *torchrun_arguments(
                    job, folder, call=call, meeting=_meeting(job, call, ranks_per_node)
                ),
            )
        )
        for call in calls
    )


def _first_on_path(job: Job) -> str:
    """What comes before a command in a shell, for the folders that its Python searches first."""
    if not job.toolchain.paths:
        return ""
    return f"PYTHONPATH={shlex.quote(before(job.toolchain.paths, None))} "


def _meeting(job: Job, call: Call, ranks_per_node: int | None) -> Rendezvous:
    """The rendezvous of nodes with that many ranks; the user fills in ``HEAD_NODE:29500``."""
    ranks = part_of(job, call).world_size
    recovery = job.spec.recovery if comes_in_passes(job) else None
    fewest, most = recovery.nodes if recovery else (1, 1)
    if ranks_per_node is not None and ranks > ranks_per_node * most:
        nodes, rest = divmod(ranks, ranks_per_node)
        if rest:
            raise ValueError(f"{ranks} ranks do not fill nodes of {ranks_per_node}")
        fewest = most = nodes
    if most == 1:
        return Rendezvous()
    return Rendezvous(fewest, most, endpoint=HEAD_NODE, here=False)
