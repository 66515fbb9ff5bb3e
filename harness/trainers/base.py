"""What every trainer is to the rest of the harness, and how most of it is done by default.

A trainer is a package that registers a ``Trainer`` (``harness.trainers.registry``). Nobody asks
which one a set has: what can differ is a capability (``harness.model.Capabilities``), a method
here, or a feature of a release.
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGABRT, Signals
from typing import Any, ClassVar, NamedTuple

from harness.errors import ConfigError, Problem
from harness.model import (
    GLOBAL_BATCH,
    Fault,
    Job,
    RankError,
    Recovery,
    Repeat,
    RepeatKind,
    Role,
    Segment,
    SetSpec,
    Surroundings,
    Toolchain,
    TrainConfig,
    TrainerSpec,
)
from harness.run_folder.checkpoints import has_metadata
from harness.run_folder.job import JobDocument
from harness.run_folder.layout import metrics_files, seed_checkpoint_of
from harness.run_folder.passes import last_step
from harness.toml import Where, find_file, read_toml
from harness.toolchain import assume_environment, find_environment
from harness.trainers.calls import Call, Rendezvous, comes_in_passes
from harness.trainers.environment import Resources
from harness.trainers.failure import AGENT_LOG, launcher_tail
from harness.trainers.table import TrainerOfFile, TrainerTable, plain_train_config

RANK_MODULE = "harness.rank"
"""What torchrun starts as every rank of ours."""


class Source(NamedTuple):
    """A file whose bytes count to the identity of a set."""

    path: Path
    folder: Path
    """From where the program is started, so that it may import what lies there."""
    key: str
    """Of ``[trainer]``, for messages."""


class Untold(NamedTuple):
    """What a set names otherwise than its control and its trainer is not told."""

    key: str
    message: str
    hint: str


class Curve(NamedTuple):
    """The curve that a run leaves which is not probed."""

    path: Path
    columns: Mapping[str, str]
    """Signal, or ``step``, to its name in the file; others are found by their known names."""


class Limitation(NamedTuple):
    """What a release of a trainer refuses, or silently makes another run of."""

    says: str
    source: str
    """File and function of the release that it was read in."""


@dataclass(frozen=True, slots=True)
class Features:
    """Where releases of a trainer differ; by default as if it had nothing of the kind."""

    spmd_backends: bool = False
    """Sets choose how it keeps track of what is sharded."""
    cp_rotations: bool = True
    """Sets choose how context parallelism passes keys and values on."""
    sequence_block: int = 1
    """Context parallelism splits a sequence by blocks of so many tokens."""
    cuda_graphs: bool = False
    """It captures CUDA graphs unless it is told not to, but not with pipelines or experts."""
    fuses_in_twos: bool = False
    """Async TP fuses only where pipelines have microbatches of two samples or more."""


@dataclass(frozen=True, slots=True)
class Start:
    """How one call of a job is started; by default as a user would type it."""

    rank_module: str = RANK_MODULE
    call: Call | None = None
    """None: the first."""
    meeting: Rendezvous | None = None
    devices: tuple[int, ...] | None = ()
    """Ids of its GPUs; None where a scheduler hands them out."""
    data: Path | None = None
    """The folder of its corpus."""
    logs: Path | None = None
    """The folder for what ranks print; None: the run folder's ``logs``."""
    python: Path | None = None
    """Stands in for the toolchain's (warm start)."""


class Trainer(ABC):
    """One trainer. Its methods are pure but for those that say what they read."""

    kind: ClassVar[str]
    """``[trainer] kind``."""
    own_rank_code: ClassVar[bool] = False
    """Its ranks are ``harness.rank``: they end with the harness, and print their stacks for
    SIGUSR1; what of their evidence cannot be read is our mistake, and no program's."""
    stack_signal: ClassVar[Signals] = SIGABRT
    """Makes a rank that hangs say where it stands."""

    # ------------------------------------------------------- an experiment file

    table: ClassVar[type[TrainerTable]] = TrainerTable
    """What ``[trainer]`` of its kind may hold."""
    own_words: ClassVar[Mapping[str, str]] = {}
    """Keys of its train configs that an experiment file has words of its own for, and these: a
    ``set`` of one would contradict what the plan computes from that word."""

    @abstractmethod
    def of_file(
        self, table: Any, where: Where, folders: Sequence[Path], problems: list[Problem]
    ) -> TrainerOfFile:
        """What ``[trainer]`` means for all sets of a file. Looks for the files that it names.

        Args:
            table: as written, an instance of ``self.table``.
            where: from a key of ``[trainer]`` to its place, for messages.
            folders: where relative paths are looked up; the first match wins. The first has the
                experiment file.
            problems: where what is wrong is added.
        """

    def file_problems(
        self, trainer: TrainerSpec, data: Mapping[str, object], where: Where
    ) -> Iterable[Problem]:
        """What else a file says that has no meaning for the trainer; ``data`` is the file."""
        return ()

    def train_config(self, tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
        """A train config from a file, or from the experiment file itself.

        Args:
            tables: as TOML gave them.
            path: what it is called in messages.
            place: what comes before a dotted key in messages.

        Raises:
            ConfigError: it cannot be understood.
        """
        return plain_train_config(tables, path, place)

    def load_train_config(
        self, written: str, folders: Sequence[Path], asked_at: str
    ) -> TrainConfig:
        """Read a train config.

        Args:
            written: the path as the experiment file writes it.
            folders: where a relative path is looked up, first match wins.
            asked_at: file and dotted key that names it, for the message when it is not there.

        Raises:
            ConfigError: it does not exist, is no TOML, or its ``[converge]`` table is wrong.
        """
        path = find_file(written, folders)
        if path is None:
            looked = ", ".join(str(folder) for folder in folders)
            raise ConfigError(
                Problem(asked_at, f"there is no train config {written!r}", f"looked in: {looked}")
            )
        return self.train_config(read_toml(path), written, f"{path}:")

    def override_problems(self, overrides: Mapping[str, Any], where: Where) -> Iterable[Problem]:
        """Settings (dotted keys) that no set may choose, whatever it is."""
        return ()

    def set_problems(
        self, table: Any, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        """What is wrong with a set besides what its capabilities rule out.

        Args:
            table: ``[trainer]``.
            spec: the set.
            own: its own ``set``, dotted.
            where: from a key of the set to its place.
            whole: from a key of ``[trainer]`` to its place.
        """
        return ()

    def pass_problems(
        self, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        """The same of a set in several passes, which checkpoints join; ``own`` as written."""
        return ()

    def completed(self, spec: SetSpec) -> SetSpec:
        """A set with what only its own settings tell, as files that they name."""
        return spec

    def unmakeable(
        self, repeat: Repeat, trainer: TrainerSpec, controls: Sequence[SetSpec]
    ) -> tuple[str, str]:
        """Why a repeat that a file asks for cannot be made, and a hint; both empty when it can."""
        if repeat.kind is RepeatKind.PERMUTE:
            why = (
                f"cannot be made of a {self.kind} trainer: its program deals out the samples of a "
            )
            hint = "use rerun and ulp repeats" if trainer.can.probed else "use rerun"
            return f"{why}batch", hint
        if repeat.kind is RepeatKind.ULP and not trainer.can.probed:
            return "cannot be made: only the probe moves initial weights", "use rerun"
        return "", ""

    def takes_seed(self, trainer: TrainerSpec) -> bool:
        """Whether a run is told its seed: else all seeds would be one run."""
        return True

    # ------------------------------------------------------------------ a plan

    @abstractmethod
    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        """What of its own settings can change a number, as JSON values, by keys of its own."""

    def describe(self, spec: SetSpec) -> str:
        """What trains a set, in words; empty where nobody needs to be told."""
        return spec.trainer.kind

    def sources(self, spec: SetSpec) -> Iterable[Source]:
        """Files whose bytes count to the identity of a set, digested into ``Surroundings``."""
        return ()

    def untold(self, job: Job, control: Job) -> Iterable[Untold]:
        """What a job names otherwise than its control and what does not reach its program."""
        return ()

    def features(self, toolchain: Toolchain) -> Features:
        """What the release in a toolchain has."""
        return Features()

    def limitations(self, spec: SetSpec, toolchain: Toolchain) -> Iterable[Limitation]:
        """What keeps a set from running as named although no rule says so."""
        return ()

    def warnings(self, toolchain: Toolchain, words: set[str]) -> Iterable[str]:
        """Known bugs and limits of a release that sets with these words (``pp``, ``ddp``) meet."""
        return ()

    # -------------------------------------------------------------- toolchains

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        """Where sets train, with the versions of what matters there. Reads metadata of packages.

        Raises ToolchainError: it is not there, or lacks what the trainer needs.
        """
        return find_environment(name, root, self.kind)

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        """The same as it will be once built, for plans that launch nothing."""
        return assume_environment(name, root, self.kind)

    # ------------------------------------------------------------------- a run

    def job_payload(
        self,
        job: Job,
        folder: Path,
        *,
        data: Path | None,
        seed_checkpoint: Path | None,
        device: str,
    ) -> dict[str, Any]:
        """The content of ``job.json`` (``docs/architecture.md``), without its schema version."""
        told = job_document(job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device)
        return {**told, "trainer": self.kind}

    @abstractmethod
    def argv(self, job: Job, folder: Path, start: Start) -> tuple[str, ...]:
        """A call of a job, as a user would type it."""

    def agent_argv(self, job: Job, folder: Path, start: Start) -> tuple[str, ...]:
        """What the harness itself starts for one agent of a call."""
        return self.argv(job, folder, start)

    def node_arguments(
        self, job: Job, folder: Path, call: Call, meeting: Rendezvous, rank_module: str
    ) -> tuple[str, ...]:
        """Arguments of ``harness.rank.node`` on one node of a scheduler's job.

        Raises ValueError for a trainer that no scheduler runs.
        """
        raise ValueError(f"{self.kind} is run by no scheduler")

    def printable(
        self, job: Job, folder: Path, ranks_per_node: int | None, data: Path | None
    ) -> str:
        """The call as one line for a shell; on several nodes to be given on every one.

        Raises ValueError when the ranks do not fill nodes of that size.
        """
        return shlex.join(self.argv(job, folder, Start(data=data)))

    def is_offline(self, job: Job) -> bool:
        """Whether a job needs nothing from the network, and is kept from it."""
        return False

    def environment(
        self,
        pinned: Mapping[str, str],
        resources: Resources,
        job: Job,
        folder: Path,
        meeting: Rendezvous | None,
        data: Path | None,
    ) -> dict[str, str]:
        """The environment of a job's processes: what is pinned for all, and what is its own."""
        return dict(pinned)

    def needs_port(self, job: Job) -> bool:
        """Whether somebody has to choose a free port for the job's ranks."""
        return False

    def prepare(self, job: Job, folder: Path) -> None:  # noqa: B027 - most need nothing
        """Make what a job needs in its run folder; raises OSError."""

    def work_folder(self, job: Job, folder: Path) -> Path:
        """Where a job's processes are started, instead of ``folder``."""
        return folder

    def curve(self, job: Job, folder: Path) -> Path | None:
        """Where a job that is not probed leaves its curve, by whose growth it is seen to go on."""
        return None

    def is_complete(self, job: Job, folder: Path) -> bool:
        """Whether a job that ended well left what it was run for. Looks into the run folder."""
        return is_complete(job, folder)

    def launcher_log(self, job: Job) -> str:
        """What the log is called that a job's launcher prints to."""
        return AGENT_LOG

    def error(self, logs: Sequence[Path], failed: Sequence[Path], returncode: int) -> RankError:
        """Why a call failed: the words of the rank that failed first. Reads logs.

        ``logs`` are the folders of all agents of the call, ``failed`` those of agents that were
        there at its end, ``returncode`` is that of the call.
        """
        text = launcher_tail(logs[0])
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return RankError(None, f"ended with exit code {returncode}: {last.strip()}", text)

    def incomplete(self, job: Job, folder: Path, last: int | None) -> str:
        """What is missing of a run whose ranks all ended well; ``last`` is its last step."""
        return "every rank ended well, but training is not complete"

    def waits_for(self, job: Job) -> str:
        """What a rank that ends no step may wait for, as the end of a sentence; empty: unknown."""
        return ""

    # ---------------------------------------------------------------- evidence

    def spec_of(self, job: Mapping[str, Any]) -> TrainerSpec:
        """The trainer as ``job.json`` tells it.

        Raises KeyError, TypeError or ValueError where it does not.
        """
        return TrainerSpec(self.kind)

    def curve_of(self, folder: Path, job: Mapping[str, Any]) -> Curve | None:
        """Where a run that is not probed has left its curve; None: its evidence is the probe's.

        Raises EvidenceError where ``job.json`` does not say it.
        """
        return None

    def data_types(self, job: Mapping[str, Any], ran: Mapping[str, Any]) -> set[str]:
        """Those that the job names and those that were in force, as far as either says so."""
        return {str(ran.get("mixed_precision_param"))}


def job_document(
    job: Job, folder: Path, *, data: Path | None, seed_checkpoint: Path | None, device: str
) -> JobDocument:
    """What ``job.json`` (``docs/architecture.md``) says of any job.

    ``data`` is the folder of the job's corpus, named after its digest.
    """
    spec = job.spec
    config = spec.train_config
    in_passes = comes_in_passes(job)
    overrides = dict(spec.overrides)
    if in_passes:
        # Each segment accumulates up to it: it must not follow from a segment's own degrees.
        overrides[GLOBAL_BATCH] = job.global_batch_size
    recovery = spec.recovery if in_passes else None
    return {
        "name": job.name,
        "role": job.role.value,
        "identity": job.identity,
        "dialect": job.toolchain.dialect,
        "run_folder": str(folder.absolute()),
        "seed": job.seed,
        "steps": job.steps,
        "parallelism": asdict(spec.parallelism),
        "techniques": [technique.value for technique in spec.techniques],
        "pipeline_schedule": spec.pipeline_schedule,
        "cp_rotation": spec.cp_rotation,
        "spmd_backend": spec.spmd_backend,
        "train_config": {
            "path": config.path,
            "module": config.module,
            "config": config.config,
            "model": dict(config.model),
            "settings": dict(config.settings),
            "loader": config.loader.value,
        },
        "overrides": overrides,
        "data": {"folder": str(data.absolute()), "digest": data.name} if data else None,
        "seed_checkpoint": str(seed_checkpoint.absolute()) if seed_checkpoint else None,
        "sample_steps": list(job.sample_steps),
        "frozen": job.frozen,
        "segments": [_plain(segment) for segment in spec.segments] if in_passes else [],
        "checkpoint_every": recovery.checkpoint_every if recovery else None,
        "faults": [_plain(fault) for fault in recovery.faults] if recovery else [],
        "elastic_nodes": recovery is not None and recovery.nodes[0] < recovery.nodes[1],
        "recovery": _plain(recovery) if recovery else None,
        "repeat": job.repeat.kind.value if job.repeat else None,
        "repeat_seed": job.repeat.seed if job.repeat else 1,
        "inject": spec.inject,
        "without_fixes": list(spec.without_fixes),
        "device": device,
    }


def _plain(value: Segment | Fault | Recovery) -> Any:
    """A dataclass of ours in the words of JSON, whose keys are those of its fields."""
    return json.loads(json.dumps(asdict(value)))


def is_complete(job: Job, folder: Path) -> bool:
    """Whether a job that ended well left what it was run for."""
    if job.role is Role.SEED:
        return has_metadata(seed_checkpoint_of(folder))
    if comes_in_passes(job):
        return last_step(folder) == job.steps
    return metrics_files(folder)[1].is_file()
