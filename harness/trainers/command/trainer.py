"""Any program as a trainer."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from converge_harness import DISTRIBUTION, __version__
from converge_harness.errors import EvidenceError, Problem, ToolchainError
from converge_harness.model import (
    DATA_TYPE_KEYS,
    Capabilities,
    ConfigKeys,
    FaultKind,
    InForce,
    Job,
    Kind,
    Launcher,
    RankError,
    SetSpec,
    Surroundings,
    Toolchain,
    TrainerSpec,
)
from converge_harness.run_folder.checkpoints import OUR_FORM, CheckpointForm
from converge_harness.run_folder.job import (
    JobDocument,
    is_probed,
    moved_with,
    named_checkpoint_form,
)
from converge_harness.run_folder.layout import AGENT_LOG, CHECKPOINTS, JOB, OUTPUT, PROGRAM_LOG
from converge_harness.run_folder.starts import last_start_ended_well
from converge_harness.run_folder.weight_mapping import weight_mapping_of
from converge_harness.toml import Where
from converge_harness.toolchains.find import assume_environment, find_environment
from converge_harness.trainers.base import (
    CallOptions,
    CurveFile,
    DifferenceNotPassed,
    SourceFile,
    Trainer,
    curve_outside,
    is_complete,
    job_document,
)
from converge_harness.trainers.calls import Call, NodeCommand, Rendezvous, comes_in_passes
from converge_harness.trainers.command import argv, on_nodes
from converge_harness.trainers.command.argv import (
    command_of,
    describe_command,
    is_told_its_ranks,
    passed_values,
)
from converge_harness.trainers.command.audit import ProgramAudit
from converge_harness.trainers.command.failure import program_error
from converge_harness.trainers.command.program import interpreter_of, with_files_of
from converge_harness.trainers.command.settings import (
    CHECKPOINT_DIR,
    STOP_AT,
    Command,
    RankLauncher,
    passed,
)
from converge_harness.trainers.command.table import (
    CommandTable,
    lacks,
    lacks_to_continue,
    node_problems,
    not_passed,
    read_command,
    restart_problems,
    set_problems,
    torn_problems,
)
from converge_harness.trainers.command.written import written_table
from converge_harness.trainers.environment import Resources
from converge_harness.trainers.table import TrainerOfFile
from converge_harness.trainers.torchrun import AGENT_MODULE

PACKAGE = __name__.partition(".")[0]
"""What a probed program imports."""
LOOPBACK_TORCHRUN = Path(__file__).parents[2] / "rank" / "start" / "loopback.py"
"""torchrun with ports that only this machine can reach; does not need this package."""
ON_ONE_NODE = frozenset({RankLauncher.COMPOSER, RankLauncher.DEEPSPEED, RankLauncher.NONE})
"""Launchers that srun starts on one node only."""
RESUMED = (Kind.ELASTIC, Kind.FAULT)
"""Kinds of sets that a program can be trained as if it can be stopped and resumed."""
KEYS = ConfigKeys(warmup_steps="lr_scheduler.warmup_steps")
FAULTS = frozenset(FaultKind)
"""All: the probe can make them, or wait for them."""
OF_AGENTS = frozenset({FaultKind.AGENT_LOSS, FaultKind.JOIN})
"""Nodes that leave and join are torchrun's agents."""
FAULTS_BY_CURVE = frozenset(
    {FaultKind.KILL, FaultKind.HANG, FaultKind.PREEMPT, FaultKind.CKPT_TORN}
)
"""Without the probe: converge sends a rank, or all, a signal once the curve has the step.

It can cut a checkpoint that is complete, but does not see when one is being written.
"""


def trained_by(command: Command) -> TrainerSpec:
    """The trainer of sets that a command trains."""
    probed = command.probed
    resumed = [kind for kind in RESUMED if not lacks(kind, command)[0]]
    can = Capabilities(
        probed=probed,
        shares_initial_weights=command.weights is not None,
        rounds_otherwise=probed,
        kinds=frozenset({Kind.PARALLEL, Kind.SPACE_TIME, *resumed}),
        faults=_faults(command) if Kind.FAULT in resumed else frozenset(),
        under_torchrun=command.launcher is RankLauncher.TORCHRUN,
        replicas_leave=True,
        continues=not lacks_to_continue(command)[0],
        under_scheduler=command.launcher is not RankLauncher.MPIRUN,
    )
    return TrainerSpec("command", can, command, keys=KEYS, audit=ProgramAudit())


def _faults(command: Command) -> frozenset[FaultKind]:
    if not command.probed:
        return FAULTS_BY_CURVE
    return FAULTS if command.launcher is RankLauncher.TORCHRUN else FAULTS - OF_AGENTS


class CommandTrainer(Trainer):
    """Any program under any launcher."""

    kind = "command"
    table = CommandTable
    accumulated = ("dp_replicate", "dp_shard")
    mapping_key = "weights"
    leaves_out = frozenset(RESUMED)
    imports = ("torch", PACKAGE)

    def default_spec(self) -> TrainerSpec:
        return TrainerSpec(self.kind, Capabilities(probed=True), keys=KEYS, audit=ProgramAudit())

    def of_file(
        self, table: CommandTable, where: Where, folders: Sequence[Path], problems: list[Problem]
    ) -> TrainerOfFile:
        command = read_command(table, where, folders, problems)
        return TrainerOfFile(
            trainer=trained_by(command),
            toolchain=interpreter_of(table.toolchain, table.python, where, folders, problems),
            maps_weights=command.weights is not None,
        )

    def file_problems(
        self, trainer: TrainerSpec, data: Mapping[str, object], where: Where
    ) -> Iterator[Problem]:
        if not trainer.can.probed and "probe" in data:
            yield Problem(
                where("probe"),
                "has no effect: with trainer.probe = false no per-tensor evidence is taken",
                "leave [probe] out",
            )

    def set_problems(
        self, table: CommandTable, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        return set_problems(table, spec, own, where, whole)

    def pass_problems(
        self, spec: SetSpec, own: Mapping[str, Any], where: Where, whole: Where
    ) -> Iterable[Problem]:
        return (
            *restart_problems(spec, where),
            *torn_problems(spec, where),
            *node_problems(spec, where),
        )

    def why_not(self, kind: Kind, trainer: TrainerSpec) -> tuple[str, str]:
        if kind not in RESUMED:
            return super().why_not(kind, trainer)
        why, hint = lacks(kind, trainer.settings)
        return f"{kind.value!r} {why}", hint

    def why_not_continued(self, trainer: TrainerSpec) -> tuple[str, str]:
        why, hint = lacks_to_continue(trainer.settings)
        return f"a run that continues {why}", hint

    def why_left_out(self, spec: SetSpec, control: SetSpec, accumulated: int) -> str:
        return not_passed(spec, control, accumulated)

    def why_not_under(self, launcher: Launcher, trainer: TrainerSpec) -> tuple[str, str]:
        by: RankLauncher = trainer.settings.launcher
        if launcher is Launcher.LOCAL and by is RankLauncher.SRUN:
            return "but trainer.launcher = 'srun' is Slurm's", "trainer.launcher = 'mpirun'"
        if launcher is Launcher.KUBERNETES and by in (RankLauncher.SRUN, RankLauncher.MPIRUN):
            return (
                f"where each pod starts its own ranks, not {by.value}",
                "trainer.launcher = 'torchrun'",
            )
        if launcher is not Launcher.LOCAL and by is RankLauncher.MPIRUN:
            return "where srun starts the ranks, not mpirun", "trainer.launcher = 'srun'"
        return "", ""

    def why_one_node(self, spec: SetSpec) -> tuple[str, str]:
        by = command_of(spec).launcher
        if by not in ON_ONE_NODE:
            return "", ""
        who = "a program without a launcher" if by is RankLauncher.NONE else by.value
        return f"{who} starts ranks on one node only", "trainer.launcher = 'torchrun' or 'srun'"

    def completed(self, spec: SetSpec) -> SetSpec:
        """Add the files that its settings name to its sources."""
        return replace(spec, trainer=trained_by(with_files_of(command_of(spec), spec)))

    def takes_seed(self, trainer: TrainerSpec) -> bool:
        return "seed" in passed(trainer.settings)

    def identity(self, spec: SetSpec, surroundings: Surroundings) -> Mapping[str, Any]:
        """How a program is called, and the content of its files, but not its location.

        Templates count unfilled: their values are among the other facts. Only the name is not, so
        it counts here if the program gets it.
        """
        command = command_of(spec)
        resumed = command.checkpoints if spec.resumes else None
        return {
            "command": {
                **({"name": spec.name} if "name" in passed(command) else {}),
                # Absent where nothing resumes, so that such runs keep their identities.
                **({} if resumed is None else {"checkpoints": asdict(resumed)}),
                "argv": list(command.argv),
                "launcher": command.launcher.value,
                "probed": command.probed,
                "curves": command.curves,
                "columns": dict(command.columns),
                **argv.of_means(command),
                "environment": dict(command.environment),
                "sources": [surroundings.sources[path] for path in command.sources],
            },
            **_weights(command),
        }

    def describe(self, spec: SetSpec) -> str:
        return describe_command(command_of(spec))

    def sources(self, spec: SetSpec) -> Iterable[SourceFile]:
        command = command_of(spec)
        return (SourceFile(path, command.folder, "command") for path in command.sources)

    def table_of(
        self, specs: Sequence[SetSpec], placed: Mapping[Path, str]
    ) -> tuple[dict[str, Any], str]:
        return written_table(specs, placed)

    def differences_not_passed(self, job: Job, control: Job) -> Iterator[DifferenceNotPassed]:
        if job.spec.starts_from_control:
            return  # another trainer's: the two are not called alike
        keys = {*job.spec.overrides, *control.spec.overrides}
        named = [
            (
                each.spec.parallelism,
                each.spec.train_config.path,
                {key: each.spec.setting(key) for key in keys},
            )
            for each in (job, control)
        ]
        if named[0] != named[1] and passed_values(job) == passed_values(control):
            yield DifferenceNotPassed(
                "trainer.command",
                f"calls {job.name} exactly like {control.name}, so a run would be compared with "
                "itself",
                "pass what differs by a placeholder (docs/any-trainer.md)",
            )
        elif job.world_size != control.world_size and not is_told_its_ranks(job, control):
            yield DifferenceNotPassed(
                "trainer.command",
                f"nothing tells the program of {job.name} to use {job.world_size} ranks, because "
                "there is no launcher",
                "pass {ranks} or its degrees, or name a launcher",
            )

    def find_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        found = find_environment(name, root, self.kind)
        if trainer.can.probed:
            _require_probe(found)
            _require_version(found)
        return found

    def assume_toolchain(self, name: str, root: Path | None, trainer: TrainerSpec) -> Toolchain:
        found = assume_environment(name, root, self.kind)
        if trainer.can.probed and found.versions:
            _require_probe(found)
        return found

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
        document = job_document(
            job, folder, data=data, seed_checkpoint=seed_checkpoint, device=device
        )
        form = command_of(job.spec).checkpoints if comes_in_passes(job) else None
        return {
            **document,
            **(
                {}
                if form is None
                else {"checkpoints": {"name": form.name, "last_file": form.last_file}}
            ),
            "command": argv.payload(job, folder, data),
            **_weights(command_of(job.spec)),
        }

    def argv(self, job: Job, folder: Path, options: CallOptions) -> tuple[str, ...]:
        return argv.command_argv(
            job,
            folder,
            call=options.call,
            meeting=options.meeting,
            devices=options.devices,
            data=options.data,
        )

    def agent_argv(self, job: Job, folder: Path, options: CallOptions) -> tuple[str, ...]:
        ours = command_of(job.spec).probed
        return argv.command_argv(
            job,
            folder,
            call=options.call,
            torchrun=("-m", AGENT_MODULE) if ours else (str(LOOPBACK_TORCHRUN),),
            meeting=options.meeting,
            logs=options.logs,
            devices=options.devices,
            data=options.data,
        )

    def node_command(self, job: Job, folder: Path, options: CallOptions) -> NodeCommand:
        return on_nodes.node_command(
            job,
            folder,
            call=options.call,
            meeting=options.meeting,
            devices=options.devices,
            data=options.data,
            variables=options.variables,
        )

    def one_task_per_rank(self, spec: SetSpec) -> bool:
        return command_of(spec).launcher is RankLauncher.SRUN

    def printable(
        self, job: Job, folder: Path, ranks_per_node: int | None, data: Path | None
    ) -> str:
        return argv.printable(job, folder, data)

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
        return argv.with_variables(
            pinned,
            job,
            folder,
            device=resources.device,
            here=resources.loopback is not None or resources.one_node,
            # On a node without this package nobody else keeps torchrun to loopback.
            agent=command_of(job.spec).probed or not resources.one_node,
            meeting=meeting,
            data=data,
            call=call,
        )

    def variables(self, job: Job, folder: Path, call: Call, data: Path | None) -> Mapping[str, str]:
        return argv.variables_of_file(job, folder, data, call)

    def needs_port(self, job: Job) -> bool:
        return argv.needs_port(job)

    def own_folders(self, job: Job) -> tuple[str, ...]:
        if command_of(job.spec).checkpoints is None:
            return (OUTPUT,)
        return (OUTPUT, CHECKPOINTS)

    def folder_of_call(self, job: Job, folder: Path, call: Call) -> Path | None:
        output = argv.output_of(job, folder, call)
        return None if output == folder.absolute() / OUTPUT else output

    def work_folder(self, job: Job, folder: Path) -> Path:
        return command_of(job.spec).folder

    def checkpoint_form(self, job: Job) -> CheckpointForm:
        return command_of(job.spec).checkpoints or OUR_FORM

    def curve(self, job: Job, folder: Path) -> Path | None:
        return argv.curves_of(job, folder)

    def curve_of_call(self, job: Job, folder: Path, call: Call) -> Path | None:
        return argv.curves_of(job, folder, call)

    def is_complete(self, job: Job, folder: Path) -> bool:
        if command_of(job.spec).probed:
            return is_complete(job, folder)
        if comes_in_passes(job):
            return last_start_ended_well(folder)
        curves = argv.curves_of(job, folder)
        return curves is not None and curves.exists()  # it may be a folder, such as TensorBoard's

    def launcher_log(self, job: Job) -> str:
        under_torchrun = command_of(job.spec).launcher is RankLauncher.TORCHRUN
        return AGENT_LOG if under_torchrun else PROGRAM_LOG

    def error(
        self,
        logs: Sequence[Path],
        failed: Sequence[Path],
        returncode: int | None,
        script: Path | None = None,
    ) -> RankError:
        return program_error(logs, returncode, script)

    def incomplete(self, job: Job, folder: Path, last: int | None, call: Call | None = None) -> str:
        curves = argv.curves_of(job, folder, call)
        if curves is not None:
            return (
                f"the program ended with 0, but there is no {curves}: it has to write its curve "
                "there (trainer.curves)"
            )
        if last is None:
            return (
                "the program ended with 0, but its probe recorded no step: call "
                "converge_harness.probe as docs/probe.md shows, or "
                "set trainer.probe = false and name trainer.curves"
            )
        return (
            f"the program ended with 0 after step {last} of {job.steps}: it has to take {{steps}} "
            "from the template, and call probe.step at the end of each"
        )

    def unsaved(self, job: Job) -> str:
        command = command_of(job.spec)
        form = command.checkpoints
        then = f" as {form.name}" if form else ""
        if command.probed:
            then = ", and then call probe.saved(step)"
        return (
            f"the program has to stop after the step that {{{STOP_AT}}} says, write that step's "
            f"checkpoint into {{{CHECKPOINT_DIR}}}{then}"
        )

    def waits_for(self, job: Job) -> str:
        if job.world_size == 1:
            return ""
        return "a step of a probe ends when every rank has called probe.step()"

    # ---------------------------------------------------------------- evidence

    def spec_of(self, job: Mapping[str, Any]) -> TrainerSpec:
        command = job["command"]
        document = cast("JobDocument", job)
        return trained_by(
            Command(
                argv=tuple(command["argv"]),
                folder=Path(command["folder"]),
                launcher=RankLauncher(command["launcher"]),
                probed=is_probed(document),
                curves=command["curves"],
                columns=command["columns"],
                mean_over=command.get("mean_over", 1),
                environment=command["environment"],
                checkpoints=named_checkpoint_form(document),
                weights=weight_mapping_of(document.get("weights")),
            )
        )

    def curve_of(self, folder: Path, job: Mapping[str, Any]) -> CurveFile | None:
        command = job["command"]
        if is_probed(cast("JobDocument", job)):
            return None
        curves = command.get("curves")
        if curves is None:
            raise EvidenceError(f"{folder / JOB}: names no curves of a program without a probe")
        try:
            path = moved_with(folder, curves, job["run_folder"])
        except (ValueError, KeyError):
            raise curve_outside(curves) from None
        columns = dict(command.get("columns") or {})
        return CurveFile(path, columns, command.get("mean_over", 1))

    def data_types(self, job: Mapping[str, Any], ran: InForce) -> set[str]:
        """The data types in the job's train config, after the set's own settings."""
        found: set[str] = set()
        for key in DATA_TYPE_KEYS:
            value: object = job["train_config"]["settings"]
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            found.add(str((job.get("overrides") or {}).get(key, value)))
        return found


def _weights(command: Command) -> JobDocument:
    """The names of another trainer's checkpoint, if the program starts from one."""
    return {"weights": command.weights.document()} if command.weights else {}


def _require_probe(found: Toolchain) -> None:
    """Raise ToolchainError for an environment in which no program can be probed."""
    if "torch" not in found.versions:
        raise ToolchainError(
            f"{found.python} has no torch, so its program cannot be probed: install torch "
            "there, name another toolchain or python, or set trainer.probe = false"
        )
    if DISTRIBUTION not in found.versions:
        why = "no converge, so its program cannot be probed: install it"
        raise ToolchainError(f"{found.python} has {why} with: {_installing(found)}")


def _require_version(found: Toolchain) -> None:
    """Raise ToolchainError for an environment with the probe of another version."""
    version = found.versions[DISTRIBUTION]
    if version != __version__:
        raise ToolchainError(
            f"{found.python} has converge {version}, whose probe may read what {__version__} "
            f"writes otherwise: install this one with: {_installing(found)}"
        )


def _installing(found: Toolchain) -> str:
    python = shlex.quote(str(found.python))
    return f"converge toolchain install {python}, or set trainer.probe = false"


TRAINER = CommandTrainer()
