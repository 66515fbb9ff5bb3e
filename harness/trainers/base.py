"""The interface of a trainer, with defaults for most methods.

A trainer is a package that registers a ``Trainer`` (``converge_harness.trainers.registry``). Nobody
asks which one a set has: what can differ is a capability (``converge_harness.model.Capabilities``),
a method here, or a feature of a release.
"""

from __future__ import annotations

import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import SIGABRT, Signals
from typing import Any, ClassVar, NamedTuple

from converge_harness.errors import ConfigError, EvidenceError, Problem
from converge_harness.model import (
    GLOBAL_BATCH,
    InForce,
    Job,
    Kind,
    Launcher,
    RankError,
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
from converge_harness.run_folder.checkpoints import OUR_FORM, CheckpointForm, has_metadata
from converge_harness.run_folder.job import JobDocument
from converge_harness.run_folder.layout import AGENT_LOG, metrics_files, seed_checkpoint_of
from converge_harness.run_folder.passes import last_step
from converge_harness.toml import Where, find_file, read_toml
from converge_harness.toolchains.find import assume_environment, find_environment
from converge_harness.trainers.calls import (
    Call,
    NodeCommand,
    Rendezvous,
    comes_in_passes,
    left_passes,
)
from converge_harness.trainers.environment import Resources
from converge_harness.trainers.failure import launcher_tail, log_tail
from converge_harness.trainers.table import TrainerOfFile, TrainerTable, plain_train_config

RANK_MODULE = "converge_harness.rank"
"""The module that torchrun starts in every rank of our own rank code."""


class SourceFile(NamedTuple):
    """A file whose content is part of a set's identity."""

    path: Path
    folder: Path
    """Working directory of the program, from which it may import."""
    key: str
    """Key of ``[trainer]``, for messages."""


class DifferenceNotPassed(NamedTuple):
    """A difference between a set and its control that the program of the set does not get."""

    key: str
    message: str
    hint: str


def normal_path(path: Path) -> Path:
    """An absolute path without ``..``; links stay. Keys of ``placed`` in ``table_of`` are such."""
    return Path(os.path.normpath(path))


class CurveFile(NamedTuple):
    """The curve of a run without the probe."""

    path: Path
    columns: Mapping[str, str]
    """By signal or ``step``, its name in the file; others are found by their usual names."""
    mean_over: int = 1
    """As in ``Evidence``."""


def curve_outside(curve: str | Path) -> EvidenceError:
    """The error for a curve that is not in the folder of its run."""
    return EvidenceError(
        f"{curve}: is outside of the run folder, so it may be the curve of another run"
    )


class OfMicrobatch(NamedTuple):
    """A part of the objective that depends on which samples are together in a microbatch."""

    name: str
    """``the auxiliary loss``."""
    instead: str
    """Advice that names an objective of single samples."""


class Limitation(NamedTuple):
    """Something that a release of a trainer refuses, or silently does differently."""

    says: str
    source: str
    """File and function of the release where this was found."""


@dataclass(frozen=True, slots=True)
class Features:
    """Differences between releases of a trainer; by default it has none of these features."""

    spmd_backends: tuple[str, ...] = ()
    """Sets can choose how it tracks sharding, by these names."""
    default_spmd_backend: str | None = None
    """The one that works on the toolchain's torch."""
    cp_backends: tuple[str, ...] = ()
    """Those of them that know context parallelism."""
    cp_rotations: bool = True
    """Sets can choose how context parallelism exchanges keys and values."""
    sequence_block: int = 1
    """Context parallelism splits a sequence in blocks of this many tokens."""
    no_cuda_graphs: str = ""
    """The key that switches its CUDA graphs off: it captures them by default, but not with
    pipelines or experts. Empty: it captures none."""
    fuses_in_twos: bool = False
    """In pipelines async TP fuses only with microbatches of two or more samples."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call of a job; the defaults give what a user would type."""

    rank_module: str = RANK_MODULE
    call: Call | None = None
    """None: the first call."""
    meeting: Rendezvous | None = None
    devices: tuple[int, ...] | None = ()
    """Ids of its GPUs; None if a scheduler assigns them."""
    data: Path | None = None
    """The folder of its corpus."""
    logs: Path | None = None
    """The folder for the ranks' output; None: the run folder's ``logs``."""
    python: Path | None = None
    """Python to use instead of the toolchain's (warm start)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that only the program on a scheduler's nodes gets."""


class Trainer(ABC):
    """One trainer. Its methods are pure, except those whose docstring says what they read."""

    kind: ClassVar[str]
    """``[trainer] kind``."""
    own_rank_code: ClassVar[bool] = False
    """Its ranks are ``rank``: they end with converge, and print their stacks for
    SIGUSR1; what of their evidence cannot be read is a bug of ours, not of a program."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that its ranks import from a toolchain."""
    stack_signal: ClassVar[Signals] = SIGABRT
    """Signal that makes a hanging rank print its stack."""

    # ------------------------------------------------------- an experiment file

    table: ClassVar[type[TrainerTable]] = TrainerTable
    """The ``[trainer]`` table of its kind."""
    owned_keys: ClassVar[Mapping[str, str]] = {}
    """Train config keys for which an experiment file has its own key, and that key. Setting one of
    them with ``set`` would contradict what the plan computes from that key.
    """

    mapping_key: ClassVar[str] = ""
    """Key of its table that names the parameters of another trainer's checkpoint, so that sets can
    start from that; empty: they cannot."""

    accumulated: ClassVar[tuple[str, ...]] = ("dp_shard",)
    """The data-parallel degrees that ``space_time`` sets trade for gradient accumulation."""

    leaves_out: ClassVar[frozenset[Kind]] = frozenset()
    """Kinds that a user's program may be made fit for: a set of them that it cannot run is left
    out, and the others run. A set of any other kind that it cannot run is a mistake in the file."""

    model_keys: ClassVar[tuple[str, ...]] = ("model.", "model_spec.")
    """Train config keys, or their beginnings, on which initial weights depend."""

    def default_spec(self) -> TrainerSpec:
        """The trainer of a set without any settings of a file."""
        return TrainerSpec(self.kind)

    @abstractmethod
    def of_file(
        self, table: Any, where: Where, folders: Sequence[Path], problems: list[Problem]
    ) -> TrainerOfFile:
        """Interpret ``[trainer]`` for all sets of a file. Looks for the files that it names.

        Args:
            table: as written, an instance of ``self.table``. where: maps a key of ``[trainer]`` to
            its place, for messages. folders: where relative paths are resolved; the first match
            wins. The first one has the experiment file. problems: list to which problems are added.
        """

    def file_problems(
        self, trainer: TrainerSpec, data: Mapping[str, object], where: Where
    ) -> Iterable[Problem]:
        """Other settings of a file that have no effect with this trainer; ``data`` is the file."""
        return ()

    def train_config(self, tables: Mapping[str, Any], path: str, place: str) -> TrainConfig:
        """A train config from a file, or from the experiment file itself.

        Args:
            tables: as parsed.
            path: its name in messages.
            place: prefix of dotted keys in messages.

        Raises:
            ConfigError: it is invalid.
        """
        return plain_train_config(tables, path, place)

    def load_train_config(
        self, written: str, folders: Sequence[Path], asked_at: str
    ) -> TrainConfig:
        """Read a train config.

        Args:
            written: the path as written in the experiment file.
            folders: where a relative path is resolved; the first match wins.
            asked_at: file and dotted key that names it, for the message if it does not exist.

        Raises:
            ConfigError: it does not exist, is not TOML, or its ``[converge]`` table is wrong.
        """
        path = find_file(written, folders)
        if path is None:
            looked = ", ".join(str(folder) for folder in folders)
            raise ConfigError(
                Problem(asked_at, f"there is no train config {written!r}", f"looked in: {looked}")
            )
        config = self.train_config(read_toml(path), written, f"{path}:")
        return self.placed(config, folders, f"{path}:")

    def placed(self, config: TrainConfig, folders: Sequence[Path], place: str) -> TrainConfig:
        """A train config, once the code that it names was looked for.

        Args:
            config: as ``train_config`` returned it.
            folders: where code of one's own is looked for; the first match wins.
            place: prefix of dotted keys in messages.

        Raises:
            ConfigError: the code is there, and cannot be what the config says.
        """
        return config

    def override_problems(self, overrides: Mapping[str, Any], where: Where) -> Iterable[Problem]:
        """Problems with settings (dotted keys) that no set may have."""
        return ()

    def set_problems(
        self, table: Any, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        """Problems of a set that are not about capabilities.

        Args:
            table: ``[trainer]``.
            spec: the set.
            own: its own ``set``, dotted.
            where: maps a key of the set to its place.
            whole: maps a key of ``[trainer]`` to its place.
        """
        return ()

    def pass_problems(
        self, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        """The same for a set in several passes, joined by checkpoints.

        ``spec`` has its segments or its recovery; ``own`` is its ``set`` as written.
        """
        return ()

    def why_not(self, kind: Kind, trainer: TrainerSpec) -> tuple[str, str]:
        """Why it cannot run sets of a kind that is not among its capabilities, and a hint."""
        who = f"a {self.kind} trainer"
        if kind is Kind.SPACE_TIME:
            return (
                f"{kind.value!r} is not possible: {who} cannot have its sets generated",
                "write each as a [[test]] with its degrees and training.local_batch_size",
            )
        needs = f"{kind.value!r} needs checkpoints between its passes"
        return f"{needs}: {who} can only have kind 'parallel'", ""

    def why_not_continued(self, trainer: TrainerSpec) -> tuple[str, str]:
        """Why an interrupted run cannot continue, after ``is set, but …``, and a hint."""
        return f"a {self.kind} trainer decides itself when it writes a checkpoint", ""

    def why_left_out(self, spec: SetSpec, control: SetSpec, accumulated: int) -> str:
        """Why it cannot be told to run a generated set, as a clause; empty if it can.

        ``accumulated``: batches that a rank of the set adds up in a step.
        """
        return ""

    def why_not_under(self, launcher: Launcher, trainer: TrainerSpec) -> tuple[str, str]:
        """Why a launcher cannot start it, after its name (``but …``); empty if it can.

        And what in the file would have to change, if anything can.
        """
        if launcher is Launcher.LOCAL or trainer.can.under_scheduler:
            return "", ""
        return f"but a {self.kind} trainer runs on this machine only", ""

    def why_one_node(self, spec: SetSpec) -> tuple[str, str]:
        """Why the ranks of a set cannot be on several nodes, and a hint; both empty if they can."""
        return "", ""

    def completed(self, spec: SetSpec) -> SetSpec:
        """A set completed from its own settings, for example with files that they name."""
        return spec

    def unmakeable(
        self, repeat: Repeat, trainer: TrainerSpec, controls: Sequence[SetSpec]
    ) -> tuple[str, str]:
        """Why a repeat in a file is not possible, and a hint; both empty if it is."""
        if repeat.kind is RepeatKind.PERMUTE:
            why = f"is not possible with a {self.kind} trainer: its program distributes the "
            hint = "use rerun and ulp repeats" if trainer.can.probed else "use rerun"
            return f"{why}samples of a batch", hint
        if repeat.kind is RepeatKind.ULP and not trainer.can.probed:
            return "is not possible: only the probe can move initial weights", "use rerun"
        if repeat.kind is RepeatKind.ROUNDING and not trainer.can.rounds_otherwise:
            why = f"is not possible: this {self.kind} trainer cannot round results otherwise"
            return why, "use rerun and ulp repeats" if trainer.can.probed else "use rerun"
        return "", ""

    def of_microbatch(self, spec: SetSpec) -> OfMicrobatch | None:
        """What of the objective depends on which samples are together in a microbatch, if anything.

        Then a repeat that distributes the samples of a batch in another order is none, and a set
        needs its control's local batch size.
        """
        return None

    def takes_seed(self, trainer: TrainerSpec) -> bool:
        """Whether a run gets its seed; otherwise all seeds would give the same run."""
        return True

    # ------------------------------------------------------------------ a plan

    @abstractmethod
    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        """Its own settings that can change a number, as JSON values by its own keys."""

    def describe(self, spec: SetSpec) -> str:
        """A description of what trains a set; empty if that goes without saying."""
        return spec.trainer.kind

    def sources(self, spec: SetSpec) -> Iterable[SourceFile]:
        """Files whose content is part of a set's identity; ``Surroundings`` has their digests."""
        return ()

    def table_of(
        self, specs: Sequence[SetSpec], placed: Mapping[Path, str]
    ) -> tuple[dict[str, Any], str]:
        """Its own keys of ``[trainer]``, from which these sets can be read again elsewhere.

        Args:
            specs: sets of one file, trained by its ``[trainer]``.
            placed: by the absolute path of each file of ``sources`` (without ``..``), where it lies
            there, seen from the folder of the experiment file.

        Returns the keys, and why such a table is not possible, as a clause about the sets; the
        clause is empty if it is.
        """
        return {}, ""

    def differences_not_passed(self, job: Job, control: Job) -> Iterable[DifferenceNotPassed]:
        """Differences between a job and its control that its program does not get."""
        return ()

    def features(self, toolchain: Toolchain) -> Features:
        """The features of the release in a toolchain."""
        return Features()

    def pipeline_stages(self, job: Job) -> int:
        """How many stages the model of a job is cut into; by default one on each pipeline rank."""
        return job.spec.parallelism.pp

    def layers_to_cut(self, job: Job) -> int | None:
        """Layers that are cut into stages, with what counts as layers at both ends.

        None: it is not known.
        """
        return None

    def limitations(self, spec: SetSpec, toolchain: Toolchain) -> Iterable[Limitation]:
        """Limitations that prevent a set from running as specified, beyond the rules."""
        return ()

    def warnings(self, toolchain: Toolchain, words: set[str]) -> Iterable[str]:
        """Known bugs and limits of a release for sets with these words (``pp``, ``ddp``)."""
        return ()

    # -------------------------------------------------------------- toolchains

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        """Find a toolchain, with the versions of relevant packages. Reads packages' metadata.

        Raises ToolchainError if it does not exist, or lacks what the trainer needs.
        """
        return find_environment(name, root, self.kind)

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        """The toolchain as it will be once built, for plans that launch nothing."""
        return assume_environment(name, root, self.kind)

    def release(self, toolchain: Toolchain) -> str | None:
        """Version of the trainer itself in a toolchain; None if it has none there."""
        return None

    def toolchain_for(self, config: TrainConfig | None = None) -> str:
        """Name of the toolchain that a train config is written for; None: of any, the default.

        Raises ValueError for a trainer that has no toolchains of its own.
        """
        raise ValueError(f"{self.kind} has no toolchains of its own")

    def with_code(
        self, toolchain: Toolchain, first: tuple[Path, ...], trainer: TrainerSpec
    ) -> Toolchain:
        """The toolchain of a Python by its path, which now searches some folders before all others.

        Starts that Python. Raises ToolchainError as ``find_toolchain`` does.
        """
        return find_environment(toolchain.name, None, self.kind, first)

    # ------------------------------------------------------------------- a run

    def job_payload(
        self,
        job: Job,
        folder: Path,
        *,
        data: Path | None,
        seed_checkpoint: Path | None,
        device: str,
    ) -> JobDocument:
        """The content of ``job.json`` (``docs/architecture.md``), without its schema version."""
        common = job_document(
            job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device
        )
        return {**common, "trainer": self.kind}

    @abstractmethod
    def argv(self, job: Job, folder: Path, options: CallOptions) -> tuple[str, ...]:
        """A call of a job, as a user would type it."""

    def agent_argv(self, job: Job, folder: Path, options: CallOptions) -> tuple[str, ...]:
        """The command that converge itself starts for one agent of a call."""
        return self.argv(job, folder, options)

    def node_command(self, job: Job, folder: Path, options: CallOptions) -> NodeCommand:
        """What srun starts for one call of a scheduler's job, on as many nodes as meet.

        Raises ValueError for a trainer that cannot run under a scheduler.
        """
        raise ValueError(f"{self.kind} cannot run under a scheduler")

    def one_task_per_rank(self, spec: SetSpec) -> bool:
        """Whether srun starts every rank by itself; otherwise it starts a launcher on each node."""
        return False

    def printable(
        self, job: Job, folder: Path, ranks_per_node: int | None, data: Path | None
    ) -> str:
        """The call as one shell line; on several nodes, for every node.

        Raises ValueError if the ranks do not fill nodes of that size.
        """
        return shlex.join(self.argv(job, folder, CallOptions(data=data)))

    def is_offline(self, job: Job) -> bool:
        """Whether a job needs no network, so that its libraries are kept offline."""
        return False

    def environment(
        self,
        pinned: Mapping[str, str],
        resources: Resources,
        job: Job,
        folder: Path,
        meeting: Rendezvous | None,
        data: Path | None,
        call: Call | None,
    ) -> dict[str, str]:
        """The environment of a job's processes in a call: pinned variables and its own."""
        return dict(pinned)

    def variables(self, job: Job, folder: Path, call: Call, data: Path | None) -> Mapping[str, str]:
        """Variables that the file sets for a job's program: they replace all others."""
        return {}

    def needs_port(self, job: Job) -> bool:
        """Whether converge has to choose a free port for the job's ranks."""
        return False

    def own_folders(self, job: Job) -> tuple[str, ...]:
        """Names of folders in the run folder that a job needs, empty when it starts."""
        return ()

    def folder_of_call(self, job: Job, folder: Path, call: Call) -> Path | None:
        """A folder in the run folder that only one call of a job writes to; None: it has none."""
        return None

    def work_folder(self, job: Job, folder: Path) -> Path:
        """The working directory of a job's processes."""
        return folder

    def checkpoint_form(self, job: Job) -> CheckpointForm:
        """What the checkpoints between a job's passes look like."""
        return OUR_FORM

    def curve(self, job: Job, folder: Path) -> Path | None:
        """The curve file of a job without the probe; while it grows, the job is alive."""
        return None

    def curve_of_call(self, job: Job, folder: Path, call: Call) -> Path | None:
        """The same in one of its calls, if each leaves a curve of its own."""
        return self.curve(job, folder)

    def is_complete(self, job: Job, folder: Path) -> bool:
        """Whether a job that ended without error left complete results. Reads the run folder."""
        return is_complete(job, folder)

    def launcher_log(self, job: Job) -> str:
        """File name of the log of a job's launcher."""
        return AGENT_LOG

    def error(
        self,
        logs: Sequence[Path],
        failed: Sequence[Path],
        returncode: int | None,
        script: Path | None = None,
    ) -> RankError:
        """Why a call failed: the error of the rank that failed first. Reads logs.

        Args:
            logs: the log folders of all agents of the call.
            failed: those of agents that still existed at its end.
            returncode: the call's; None: unknown.
            script: the log of the batch script around it, if there is one.
        """
        text = next((text for each in logs if (text := launcher_tail(each))), "")
        if not text and script is not None:
            text = log_tail(script)
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        how = "was ended" if returncode is None else f"ended with exit code {returncode}"
        return RankError(None, f"{how}: {last.strip()}", text)

    def incomplete(self, job: Job, folder: Path, last: int | None, call: Call | None = None) -> str:
        """What is missing from a run whose ranks all ended with 0; ``last`` is its last step.

        ``call`` is that whose ranks these were; None: the first.
        """
        where = (
            "before its first step was finished"
            if last is None
            else f"after step {last} of {job.steps}"
        )
        return f"every rank ended with exit code 0, but training is not complete ({where})"

    def unsaved(self, job: Job) -> str:
        """What a program has to do to be resumed, as the end of a sentence on one that did not."""
        return ""

    def waits_for(self, job: Job) -> str:
        """What a rank that finishes no step may be waiting for, as the end of a sentence."""
        return ""

    # ---------------------------------------------------------------- evidence

    def spec_of(self, job: Mapping[str, Any]) -> TrainerSpec:
        """The trainer according to ``job.json``.

        Raises KeyError, TypeError or ValueError if the document does not have it.
        """
        return self.default_spec()

    def curve_of(self, folder: Path, job: Mapping[str, Any]) -> CurveFile | None:
        """The curve of a run without the probe; None: its evidence is the probe's.

        Raises EvidenceError if ``job.json`` does not name it.
        """
        return None

    def data_types(self, job: Mapping[str, Any], ran: InForce) -> set[str]:
        """The data types that the job names and those that were in force, as far as known."""
        return {str(ran.mixed_precision_param)}


def job_document(
    job: Job, folder: Path, *, data: Path | None, seed_checkpoint: Path | None, device: str
) -> JobDocument:
    """The keys of ``job.json`` (``docs/architecture.md``) that all jobs have.

    ``data`` is the folder of the job's corpus, which is named after its digest.
    """
    spec = job.spec
    config = spec.train_config
    in_passes = comes_in_passes(job)
    overrides = dict(spec.overrides)
    if in_passes:
        # Each segment accumulates to this value, so it must not depend on a segment's degrees.
        overrides[GLOBAL_BATCH] = job.global_batch_size
    recovery = spec.recovery if in_passes else None
    script = json.loads(json.dumps(recovery.facts())) if recovery else None
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
        # Absent without any, as in jobs of older releases.
        **_own_techniques(spec),
        "pipeline_schedule": spec.pipeline_schedule,
        "cp_rotation": spec.cp_rotation,
        "spmd_backend": spec.spmd_backend,
        "train_config": {
            "path": config.path,
            "module": config.module,
            "config": config.config,
            # Absent unless set, as in the identity.
            **({"arguments": dict(config.arguments)} if config.arguments else {}),
            **({"import_from": str(config.import_from)} if config.import_from else {}),
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
        "faults": script["faults"] if script else [],
        "elastic_nodes": recovery is not None and recovery.nodes[0] < recovery.nodes[1],
        "recovery": script,
        "repeat": job.repeat.kind.value if job.repeat else None,
        "repeat_seed": job.repeat.seed if job.repeat else 1,
        "inject": spec.inject,
        "without_fixes": list(spec.without_fixes),
        "device": device,
        **({"operations_of": spec.operations_of} if spec.operations_of else {}),
        **({"code": dict(job.toolchain.code)} if job.toolchain.code else {}),
        **({} if spec.trainer.can.probed else {"probed": False}),
    }


def _own_techniques(spec: SetSpec) -> JobDocument:
    if not spec.own_techniques:
        return {}
    return {
        "own_techniques": [
            {
                "name": own.name,
                "what": own.what,
                "set": dict(own.overrides),
                "apply": own.apply,
                "place": own.place,
                "in_force": own.in_force,
                "folder": own.folder,
            }
            for own in spec.own_techniques
        ]
    }


def _plain(value: Segment) -> Any:
    """A dataclass as JSON values, by field name."""
    return json.loads(json.dumps(asdict(value)))


def is_complete(job: Job, folder: Path) -> bool:
    """Whether a job that ended without error left complete results."""
    if job.role is Role.SEED:
        return has_metadata(seed_checkpoint_of(folder))
    if left_passes(job, folder):
        return last_step(folder) == job.steps
    return metrics_files(folder)[1].is_file()
