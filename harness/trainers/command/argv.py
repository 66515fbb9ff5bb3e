"""How a program is called: its argv under each launcher, its environment, what reaches it.

Pure functions of a job; ``tests/trainers`` compares what they build with golden files.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from converge_harness.model import LOCAL_BATCH, Job, Kind, Parallelism, SetSpec, Setting
from converge_harness.run_folder.job import CommandDocument
from converge_harness.run_folder.layout import (
    CHECKPOINTS,
    JOB,
    JOB_VARIABLE,
    LOGS,
    OUTPUT,
    SEGMENT_VARIABLE,
)
from converge_harness.trainers.calls import (
    FOUND_CHECKPOINT,
    Call,
    Rendezvous,
    calls_of_segments,
    comes_in_passes,
    first_call,
    most_nodes,
    part_of,
)
from converge_harness.trainers.command.settings import (
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    CONFIG,
    OF_CHECKPOINTS,
    RESUME_FROM,
    STOP_AT,
    Command,
    RankLauncher,
    fill,
    listed_key,
    placeholders,
)
from converge_harness.trainers.environment import OWN_STORE
from converge_harness.trainers.torchrun import HEAD_NODE

TORCHRUN = ("-m", "torch.distributed.run")
ANY_PORT = 29500
"""Master port in printed commands."""
UNKNOWN_DATA = "DATA"
"""In printed commands, the folder of a corpus that does not exist yet."""
_ON_LOOPBACK = Path(__file__).parents[2] / "rank" / "start" / "on_loopback"
"""First on ``PYTHONPATH`` if rank 0, not an agent of ours, makes the ranks' store."""
_WITH_PORT = frozenset(
    {RankLauncher.DEEPSPEED, RankLauncher.MPIRUN, RankLauncher.SRUN, RankLauncher.NONE}
)
"""Launchers whose ranks need a port from us; torchrun and composer find a free one."""
OF_A_TASK = (
    "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID "
    "NODE_RANK=$SLURM_NODEID LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}"
)
"""Bash in a task of srun: torch's variables (``env://``) from Slurm's. Its tasks per node are such
as ``8(x4)``: every node has as many."""


def command_of(spec: SetSpec) -> Command:
    """The command of a set that has one; raises TypeError for others."""
    if not isinstance(spec.trainer.settings, Command):
        raise TypeError(f"{spec.name} is trained by {spec.trainer.kind}")
    return spec.trainer.settings


def output_of(job: Job, folder: Path, call: Call) -> Path:
    """The value of ``{output}`` in a call: a folder in the run folder.

    A program without the probe has one for each of its starts, so that each leaves its own curve.
    """
    output = folder.absolute() / OUTPUT
    by_start = comes_in_passes(job) and not command_of(job.spec).probed
    return output / f"start-{call.number:02d}" if by_start else output


def curves_of(job: Job, folder: Path, call: Call | None = None) -> Path | None:
    """The curve file of a program without the probe in a call; None for a probed one."""
    curves = command_of(job.spec).curves
    return None if curves is None else Path(filled(curves, job, folder, call=call))


def needs_port(job: Job) -> bool:
    """Whether somebody has to choose a free port for the job's ranks."""
    return command_of(job.spec).launcher in _WITH_PORT


def payload(job: Job, folder: Path, data: Path | None) -> CommandDocument:
    """The value of ``command`` in ``job.json``, with placeholders filled in for the first call."""
    command = command_of(job.spec)
    curves = curves_of(job, folder)
    document: CommandDocument = {
        "argv": list(arguments(job, folder, data)),
        "launcher": command.launcher.value,
        "curves": None if curves is None else str(curves),
        "columns": dict(command.columns),
        **of_means(command),
        "environment": variables_of_file(job, folder, data),
        "folder": str(command.folder),
    }
    return document


def of_means(command: Command) -> CommandDocument:
    """``mean_over``, for a curve of means; nothing for others, so that they keep their identity."""
    return {} if command.mean_over == 1 else {"mean_over": command.mean_over}


def arguments(
    job: Job, folder: Path, data: Path | None = None, call: Call | None = None
) -> tuple[str, ...]:
    """The template filled in for a call (None: the first): the argv without the launcher's part."""
    return tuple(
        argument
        for each in command_of(job.spec).argv
        for argument in _arguments(each, job, folder, data, call)
    )


def _arguments(
    template: str, job: Job, folder: Path, data: Path | None, call: Call | None
) -> Iterator[str]:
    key = listed_key(template)
    if key is None:
        yield filled(template, job, folder, data, call)
    else:
        value = job.spec.setting(key)
        yield from map(written, value if isinstance(value, list) else ())


def filled(
    template: str, job: Job, folder: Path, data: Path | None = None, call: Call | None = None
) -> str:
    """A template of the job's command with its values in a call; None: the first."""
    call = call or first_call(job)
    part = part_of(job, call)
    values = {
        "output": str(output_of(job, folder, call)),
        **_values(part, data),
        **_of_checkpoints(job, folder, call),
    }

    def value_of(name: str) -> str:
        if name == CONFIG + LOCAL_BATCH and call.segment is not None:
            return str(part.local_batch_size)  # a segment may have its own
        if name.startswith(CONFIG):
            return written(part.spec.setting(name.removeprefix(CONFIG)))
        return values[name]

    return fill(template, value_of)


def written(value: Setting) -> str:
    """A train config value as an argument: text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _values(job: Job, data: Path | None) -> dict[str, str]:
    degrees = job.spec.parallelism
    return {
        "data": UNKNOWN_DATA if data is None else str(data.absolute()),
        "python": str(job.toolchain.python),
        "name": job.name,
        **{
            name: str(value)
            for name, value in {
                "steps": job.steps,
                "seed": job.seed,
                "ranks": job.world_size,
                "dp": degrees.dp,
                "dp_replicate": degrees.dp_replicate,
                "dp_shard": degrees.dp_shard,
                "tp": degrees.tp,
                "cp": degrees.cp,
                "pp": degrees.pp,
                "ep": degrees.ep,
                "local_batch_size": job.local_batch_size,
                "global_batch_size": job.global_batch_size,
                "gradient_accumulation_steps": job.gradient_accumulation_steps,
                "seq_len": job.seq_len,
            }.items()
        },
    }


def _of_checkpoints(job: Job, folder: Path, call: Call) -> dict[str, str]:
    """By what a program is stopped and resumed.

    It writes no checkpoint on the way, and stops after its last step, unless its set says more.
    Nothing to resume from is an empty text.
    """
    recovery = job.spec.recovery if comes_in_passes(job) else None
    form, step = command_of(job.spec).checkpoints, call.resumes_from
    until = job.steps if call.segment is None else job.spec.segments[call.segment].until
    folder = folder.absolute()
    newest = "" if form is None or step is None else str(form.path(folder, step))
    return {
        CHECKPOINT_DIR: str(folder / CHECKPOINTS),
        CHECKPOINT_EVERY: str(recovery.checkpoint_every if recovery else job.steps),
        RESUME_FROM: FOUND_CHECKPOINT if call.looks_for_checkpoint else newest,
        STOP_AT: str(until),
    }


def command_argv(
    job: Job,
    folder: Path,
    *,
    call: Call | None = None,
    torchrun: tuple[str, ...] = TORCHRUN,
    meeting: Rendezvous | None = None,
    logs: Path | None = None,
    devices: tuple[int, ...] | None = (),
    data: Path | None = None,
) -> tuple[str, ...]:
    """The whole call, launcher and program.

    Args:
        job: a job of a command trainer.
        folder: its run folder.
        call: which call of the job; None: the first.
        torchrun: arguments that make Python run torchrun; for that launcher only.
        meeting: with a port if ``needs_port`` says so.
        logs: the folder for ranks' output under torchrun; None: ``folder/logs``.
        devices: ids of the job's GPUs, passed to DeepSpeed because it ignores the variable.
        data: the folder of its corpus.

    Raises ValueError if Slurm starts its ranks.
    """
    call = call or first_call(job)
    program = arguments(job, folder, data, call)
    python, ranks = str(job.toolchain.python), part_of(job, call).world_size
    match command_of(job.spec).launcher:
        case RankLauncher.TORCHRUN:
            meeting = meeting or Rendezvous()
            nodes, *where = meeting.arguments()
            per_node = ranks // meeting.most
            return (
                *(python, *torchrun, nodes, f"--nproc-per-node={per_node}", *where),
                f"--rdzv-id={meeting.name or job.identity[:12]}",
                f"--max-restarts={call.max_restarts}",
                f"--log-dir={logs or folder.absolute() / LOGS}",
                "--redirects=3",
                *program,
            )
        case RankLauncher.SRUN:
            raise ValueError("srun starts ranks under Slurm only")
        case _:
            # A segment may have fewer ranks than the job.
            chosen = None if devices is None else devices[:ranks]
            return (*launcher_call(job, ranks, str(port_of(meeting)), chosen), *program)


def launcher_call(
    job: Job, ranks: int, port: str, devices: tuple[int, ...] | None
) -> tuple[str, ...]:
    """A launcher that starts all ranks of a machine, with its options; empty for ``NONE``.

    ``devices`` are ids of the job's GPUs: empty on the CPU, None if a scheduler assigns them.
    """
    python = str(job.toolchain.python)
    match command_of(job.spec).launcher:
        case RankLauncher.COMPOSER:
            return (python, "-m", "composer.cli.launcher", f"--nproc={ranks}")
        case RankLauncher.DEEPSPEED:
            # Without either option it uses every device that it finds: those that were assigned.
            chosen = () if devices is None else (f"--num_gpus={ranks}",)
            if devices:
                chosen = (f"--include=localhost:{','.join(map(str, devices))}",)
            return (python, "-m", "deepspeed.launcher.runner", f"--master_port={port}", *chosen)
        case RankLauncher.MPIRUN:
            return ("mpirun", "-n", str(ranks))
        case _:
            return ()


def port_of(meeting: Rendezvous | None) -> int:
    """The chosen port, else the one for printed commands."""
    return (meeting and meeting.port) or ANY_PORT


def with_variables(
    base: Mapping[str, str],
    job: Job,
    folder: Path,
    *,
    device: str = "cpu",
    here: bool = True,
    agent: bool = True,
    meeting: Rendezvous | None = None,
    data: Path | None = None,
    call: Call | None = None,
) -> dict[str, str]:
    """An environment plus the variables for a job's program; its own variables come last.

    ``here``: all its ranks are on one machine. ``agent``: under torchrun, an agent of ours keeps
    their store to loopback.
    """
    own = own_variables(job, folder, device, meeting, data, base.get("PATH"), call)
    made = {**base, **own}
    under_torchrun = command_of(job.spec).launcher is RankLauncher.TORCHRUN
    if here and not (agent and under_torchrun and OWN_STORE not in made):
        paths = filter(None, (str(_ON_LOOPBACK), made.get("PYTHONPATH")))
        made["PYTHONPATH"] = os.pathsep.join(paths)
    return made


def own_variables(
    job: Job,
    folder: Path,
    device: str = "cpu",
    meeting: Rendezvous | None = None,
    data: Path | None = None,
    path: str | None = None,
    call: Call | None = None,
) -> dict[str, str]:
    """Variables only for the job's program. ``path`` is the ``PATH`` of converge."""
    command = command_of(job.spec)
    call = call or first_call(job)
    # The environment's programs (ninja, accelerate) come first, as if it were activated.
    first = str(job.toolchain.python.parent)
    variables = {"PATH": f"{first}{os.pathsep}{path}" if path else first}
    if command.probed:  # otherwise a probe in the program stays off
        variables = {JOB_VARIABLE: str(folder.absolute() / JOB), **variables}
        if call.segment is not None:
            variables[SEGMENT_VARIABLE] = str(call.segment)
    if needs_port(job):
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_of(meeting))}
    if command.launcher is RankLauncher.DEEPSPEED:
        # Without this variable DeepSpeed 0.19 counts NUMA nodes as CPU devices.
        variables["LOCAL_SIZE"] = str(part_of(job, call).world_size)
        if device == "cpu":
            variables["DS_ACCELERATOR"] = "cpu"
    return variables | variables_of_file(job, folder, data, call)


def variables_of_file(
    job: Job, folder: Path, data: Path | None, call: Call | None = None
) -> dict[str, str]:
    """The variables of ``[trainer] environment``, with their values in a call."""
    return {
        name: filled(value, job, folder, data, call)
        for name, value in command_of(job.spec).environment.items()
    }


def printable(job: Job, folder: Path, data: Path | None = None) -> str:
    """The call as one shell line, to be run on every node; it changes to converge's own directory.

    For a run in several segments, their calls one after another. A probe needs the run folder's
    ``job.json``, so the line repeats a run that was started before.
    """
    command = command_of(job.spec)
    recovery = job.spec.recovery if most_nodes(job) > 1 else None
    meeting = None
    if recovery is not None:
        fewest, most = recovery.nodes
        meeting = Rendezvous(fewest, most, endpoint=HEAD_NODE, here=False)
    lines = [f"cd {shlex.quote(str(command.folder))}"]
    for call in calls_of_segments(job):
        own = own_variables(job, folder, device="", data=data, call=call)
        shown = {name: own[name] for name in own if name != "PATH" or name in command.environment}
        variables = shlex.join(f"{name}={value}" for name, value in shown.items())
        typed = shlex.join(command_argv(job, folder, call=call, meeting=meeting, data=data))
        lines.append(f"env {variables} {typed}" if variables else typed)
    return " && ".join(lines)


PYTHON = "{python}"
OF_THE_RUN = frozenset({"output", "data", "python", "name", *OF_CHECKPOINTS})
"""Placeholders that do not affect training beyond the toolchain and the corpus."""


def describe_command(command: Command) -> str:
    """``train.py by torchrun, probed``."""
    words = [each for each in command.argv if not each.startswith(("-", "{*"))]
    # The path of the Python does not say what it runs.
    program = next((each for each in words if each != PYTHON), command.argv[0])
    by = "" if command.launcher is RankLauncher.NONE else f" by {command.launcher.value}"
    return f"{program}{by}, {'probed' if command.probed else 'curves only'}"


def passed_values(job: Job) -> dict[str, Any]:
    """All values by which a call may differ from another of the same command, by name.

    Raises TypeError for jobs of other trainers.
    """
    command = command_of(job.spec)
    names = set(_names(command)) - OF_THE_RUN
    known = _known(job)
    values = {
        name: job.spec.setting(name.removeprefix(CONFIG))
        if name.startswith(CONFIG)
        else known[name]
        for name in names
    }
    data = job.spec.train_config.data
    # Without a launcher only the call itself can say how many ranks there should be.
    ranks = {} if command.launcher is RankLauncher.NONE else {"ranks": job.world_size}
    return {**values, **ranks, "python": str(job.toolchain.python), "data": data}


def is_told_its_ranks(job: Job, control: Job) -> bool:
    """Whether the call of a job says that its number of ranks differs from the control's.

    It does by a launcher, a number of ranks, a degree, or a config value that differs from the
    control's; in a segment not by such a value, which all segments have. Raises TypeError for jobs
    of other trainers.
    """
    command = command_of(job.spec)
    if command.launcher is not RankLauncher.NONE:
        return True
    names = {name for text in _handed_over(command) for name in placeholders(text)}
    if names & {"ranks", "dp", *asdict(Parallelism())}:
        return True
    keys = {name.removeprefix(CONFIG) for name in names if name.startswith(CONFIG)}
    return job.spec.kind is not Kind.ELASTIC and any(
        job.spec.setting(key) != control.spec.setting(key) for key in keys
    )


def _known(job: Job) -> dict[str, Any]:
    degrees = job.spec.parallelism
    return {
        **asdict(degrees),
        "dp": degrees.dp,
        "ranks": job.world_size,
        "steps": job.steps,
        "seed": job.seed,
        "local_batch_size": job.local_batch_size,
        "global_batch_size": job.global_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "seq_len": job.seq_len,
    }


def _names(command: Command) -> Iterator[str]:
    """Placeholders, including those of the curve's path: a program may write several curves."""
    for text in (*_handed_over(command), command.curves or ""):
        yield from placeholders(text)


def _handed_over(command: Command) -> tuple[str, ...]:
    return (*command.argv, *command.environment.values())
