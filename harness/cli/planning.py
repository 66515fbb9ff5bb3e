"""``converge plan``: what would run, for people and for programs."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cli import matrix
from harness.cli.console import PlainConsole
from harness.cli.dry_run import show_dry_run
from harness.cli.guide_options import require_cover
from harness.cli.planned import print_plan
from harness.cli.shared import make_console, names, say, store_of
from harness.errors import ConfigError, Problem, suggest
from harness.gate import ExitCode
from harness.launch.slurm.batch_script import JOB_SCRIPT, batch_script, submit_argv
from harness.model import Experiment, Job, Launcher, Plan, Role
from harness.plan import PlanRow, describe
from harness.store import Store
from harness.surroundings import gpu_models
from harness.toolchain import build_hint
from harness.trainers import assume_toolchain, printable_command


def plan(arguments: argparse.Namespace) -> ExitCode:
    """``converge plan``: what would run, or with ``--cover`` what could."""
    gc.disable()  # all that is made is kept to the end: looking for garbage is a sixth of the time
    try:
        return _plan(arguments)
    finally:
        gc.enable()


def _plan(arguments: argparse.Namespace) -> ExitCode:
    if arguments.cover is not None:
        from harness.cli import covering  # noqa: PLC0415 - pays for scipy's solvers

        return covering.cover(arguments)
    require_cover(arguments)
    _require_dry_run(arguments)
    if arguments.dry_run:
        return show_dry_run(arguments)
    made = matrix.load_plan(
        arguments.experiment,
        names(arguments.only),
        on_gpu=bool(gpu_models()),
        slots=arguments.slots,
        calibration=arguments.calibration,
        launcher=arguments.launcher,
        cluster=arguments.cluster,
        find=assume_toolchain,
    )
    store = store_of(arguments)
    if arguments.script is not None:
        print(_script(made, store, arguments.script), end="")
        return ExitCode.PASS
    described = describe(made)
    per_node = _ranks_per_node(made, arguments.ranks_per_node)
    folders = store.run_folders()
    commands = {
        job.name: f"is not run: {job.golden}"
        if job.golden is not None
        else _command(
            job, store.run_folder(job.name, job.identity, folders), made.experiment, per_node
        )
        for job in made.jobs
    }
    if arguments.json:
        for line in _document_lines(_plan_document(made, described, commands)):
            print(line)
        return ExitCode.PASS
    console = make_console()
    print_plan(console, made, described, commands)
    _print_besides(console, made)
    return ExitCode.PASS


def _print_besides(console: Console, made: Plan) -> None:
    """What the sets need that are not in the table; raises ConfigError for what is not there."""
    besides = [job.name for job in made.jobs if job.role in (Role.SEED, Role.REPEAT)]
    say(console, f"\nbesides, for initial weights and tolerances: {', '.join(besides)}")
    if others := [job.name for job in made.jobs if job.role is Role.OTHER_SEED]:
        say(console, f"by other seeds: {', '.join(others)}")
    for line in _low_precision(made):
        say(console, line)
    if made.experiment.launcher is Launcher.SLURM:
        say(
            console,
            "the scripts are written and submitted by `converge submit` (or `run`); see one: "
            "--script NAME",
        )
    if made.experiment.calibration is not None:
        if not made.experiment.calibration.is_file():
            again = f"make it with: converge calibrate {made.experiment.path}"
            raise ConfigError(
                Problem(f"calibration {made.experiment.calibration}", f"is not there; {again}")
            )
        say(console, f"tolerances learnt before: {made.experiment.calibration}")
    say(console, f"per-tensor evidence: {_sampled(made)}")
    for each in {job.toolchain.name: job.toolchain for job in made.jobs}.values():
        if not each.python.exists():
            say(
                console,
                f"toolchain {each.name} is not there yet; {build_hint(each.name)}",
                "yellow",
            )


def _low_precision(made: Plan) -> Iterator[str]:
    """Which short runs say what of low precision is rounding, and how many frozen steps that is."""
    for role, what in (
        (Role.REFERENCE, "references in float32"),
        (Role.MATCHED, "controls in the precision of test sets"),
    ):
        if jobs := [job.name for job in made.jobs if job.role is role]:
            yield f"{what}, of one step: {', '.join(jobs)}"
    frozen = [job for job in made.jobs if job.frozen]
    if frozen:
        yield (
            f"frozen steps before training: {frozen[0].frozen}, in {len(frozen)} of "
            f"{len(made.jobs)} jobs"
        )


def _require_dry_run(arguments: argparse.Namespace) -> None:
    """Refuse what only a dry run answers without one, and a script together with one."""
    problems = [
        Problem(f"--{option.replace('_', '-')}", "goes with --dry-run")
        for option in ("throughput", "gpu_memory", "device")
        if not arguments.dry_run and getattr(arguments, option) is not None
    ]
    if arguments.dry_run and arguments.script is not None:
        problems.append(Problem("--script", "does not go with --dry-run", "one at a time"))
    if problems:
        raise ConfigError(problems)


def _command(job: Job, folder: Path, experiment: Experiment, per_node: int | None) -> str:
    """How a job is started: by torchrun, or by its batch script."""
    if experiment.launcher is Launcher.SLURM:
        return shlex.join(submit_argv(folder.absolute()))
    return printable_command(job, folder, per_node)


def _script(made: Plan, store: Store, name: str) -> str:
    """The batch script of the job of that name."""
    cluster = made.experiment.cluster
    if cluster is None:
        raise ConfigError(
            Problem(f"--script {name}", "jobs on this machine have none", "add --launcher slurm")
        )
    known = [job.name for job in made.jobs]
    if name not in known:
        raise ConfigError(Problem(f"--script {name}", "there is no such job", suggest(name, known)))
    job = made.job(name)
    folder = store.run_folder(job.name, job.identity).absolute()
    errors = PlainConsole(stderr=True, highlight=False, soft_wrap=True)
    errors.print(f"`converge submit` writes it as {folder / JOB_SCRIPT}", markup=False)
    return batch_script(job, folder, cluster, experiment=made.experiment.name)


def _ranks_per_node(made: Plan, asked: int | None) -> int | None:
    """Ranks on a node: those of the cluster, else those asked for, if the sets fill them."""
    cluster = made.experiment.cluster
    if cluster is not None:
        if asked not in (None, cluster.ranks_per_node):
            raise ConfigError(
                Problem(
                    f"--ranks-per-node {asked}",
                    f"the cluster has {cluster.ranks_per_node}",
                    "change cluster.ranks_per_node",
                )
            )
        return cluster.ranks_per_node
    if asked is None:
        return None
    option = f"--ranks-per-node {asked}"
    uneven = [job for job in made.jobs if job.world_size > asked and job.world_size % asked]
    if uneven:
        raise ConfigError(
            [
                Problem(option, f"the {job.world_size} ranks of {job.name!r} do not fill nodes")
                for job in uneven
            ]
        )
    return asked


def _sampled(made: Plan) -> str:
    """The sampled steps, those of the longest job."""
    steps = max((job.sample_steps for job in made.jobs), key=len)
    if steps:
        return f"at steps {', '.join(map(str, steps))}"
    if not all(job.spec.trainer.can.probed for job in made.jobs):
        return "none, and no other (trainer.probe is false): the loss of a curve alone is judged"
    return "none (probe.cadence is off)"


def _plan_document(
    made: Plan, described: Sequence[PlanRow], commands: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "schema": 1,
        "experiment": str(made.experiment.path),
        "launcher": made.experiment.launcher.value,
        "cluster": made.experiment.cluster,
        "waived": list(made.waived),
        "sets": [{**_shallow(row), "command": commands[row.name]} for row in described],
        "jobs": [
            {
                "name": job.name,
                "role": job.role.value,
                "identity": job.identity,
                "world_size": job.world_size,
                "sample_steps": list(job.sample_steps),
                "frozen": job.frozen,
                "matched": job.matched,
                "reference": job.reference,
                "toolchain": job.toolchain.name,
                "python": str(job.toolchain.python),
                "command": commands[job.name],
            }
            for job in made.jobs
        ],
    }


def _document_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The document as JSON, a line for every set and job: thousands are written at once."""
    last = len(document) - 1
    for index, (key, value) in enumerate(document.items()):
        opening, comma = "{" if index == 0 else " ", "," if index < last else ""
        if isinstance(value, list) and value:
            yield f"{opening}{json.dumps(key)}: ["
            for place, entry in enumerate(value, 1):
                yield f"  {json.dumps(entry, default=_shallow)}{',' if place < len(value) else ''}"
            yield f" ]{comma}"
        else:
            yield f"{opening}{json.dumps(key)}: {json.dumps(value, default=_shallow)}{comma}"
    yield "}"


def _shallow(value: Any) -> dict[str, Any]:
    """A dataclass as a table of its fields, whose values are as they were."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
