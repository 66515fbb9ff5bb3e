"""``converge plan``: what would run, as a table or as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import (
    add_calibration,
    add_cluster,
    add_experiment,
    add_slots,
    add_technique,
    plan_of,
    positive,
    store_of,
)
from converge_harness.errors import ConfigError, Problem, suggest

if TYPE_CHECKING:
    from converge_harness.launch.scheduler.backend import Backend
    from converge_harness.model import Job, Plan
    from converge_harness.plan import PlanRow
    from converge_harness.store import Store

HELP = "show what an experiment would run, without running it"
DESCRIPTION = (
    "Print, per set: degrees, world size, tokens per step, the rule of the converging guide that "
    "it follows, and the exact launch command."
)
EPILOG = """\
examples:
  converge plan experiments/llama3_8b.toml --ranks-per-node 8
  the fewest jobs of at most 64 GPUs in which every pair of the file's techniques meets:
    converge plan experiments/llama3_8b.toml --cover pairs --gpus 64
  the same without a file, ready to paste into one:
    converge plan --cover pairs --gpus 64 --technique tp=2,cp=2,float8,async_tp --dp 8 --toml"""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_experiment(parser, may_miss=True)
    add_slots(parser)
    add_cluster(parser)
    add_calibration(parser)
    parser.add_argument(
        "--ranks-per-node",
        type=positive,
        metavar="N",
        help="ranks (GPUs) on a node: larger sets print a torchrun command over several nodes",
    )
    parser.add_argument(
        "--script",
        metavar="NAME",
        help="print the batch script of this job instead, as it would be submitted",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    _add_dry_run(parser)
    _add_cover(parser)


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    """``--dry-run`` and its options."""
    dry = parser.add_argument_group("building every job without its GPUs")
    dry.add_argument(
        "--dry-run",
        action="store_true",
        help="build every job on this machine up to and through its first steps, on fake tensors "
        "and a fake process group: errors by set and key, memory per rank, GPU-hours",
    )
    dry.add_argument(
        "--throughput",
        type=_amount,
        metavar="TOKENS",
        help="tokens per second and GPU, to compute costs from (default: the experiment's "
        "tokens_per_gpu_second)",
    )
    dry.add_argument(
        "--gpu-memory",
        type=_amount,
        metavar="GB",
        help="memory of a GPU, such as 80: sets that need more are listed; the exit code stays 0, "
        "since the peak is an estimate",
    )
    dry.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="the device that the jobs will run on (default: as in [cluster]; else cpu for a train "
        "config that reads converge's synthetic corpus, cuda for others)",
    )


def _add_cover(parser: argparse.ArgumentParser) -> None:
    """Options that propose jobs instead of showing those of a file."""
    cover = parser.add_argument_group("proposing jobs")
    cover.add_argument(
        "--cover",
        choices=["pairs"],
        help="propose the fewest jobs in which every pair of techniques meets. The guide assumes "
        "that a combination that passes vouches for its parts",
    )
    cover.add_argument(
        "--gpus", type=positive, metavar="N", help="the largest job that may be proposed"
    )
    add_technique(cover, required=False)
    cover.add_argument(
        "--dp",
        type=positive,
        metavar="N",
        help="with --technique: data-parallel degree of every job (default: 2)",
    )
    cover.add_argument(
        "--base",
        metavar="TRAIN_CONFIG",
        help="with --technique: a train config whose batch, sequence and model the degrees must "
        "divide",
    )
    cover.add_argument(
        "--toml", action="store_true", help="print the proposed jobs as [[test]] entries"
    )


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < amount < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return amount


def run(arguments: argparse.Namespace) -> ExitCode:
    """Show what would run, or propose jobs with ``--cover``."""
    gc.disable()  # everything lives until the end, and collecting garbage takes a sixth of the time
    try:
        return _plan(arguments)
    finally:
        gc.enable()


def _plan(arguments: argparse.Namespace) -> ExitCode:
    if arguments.cover is not None:
        with leaving_when_interrupted():
            from converge_harness.cli.cover import cover

        return cover(arguments)
    _require_cover(arguments)
    _require_dry_run(arguments)
    if arguments.dry_run:
        with leaving_when_interrupted():
            from converge_harness.cli.dry_run import show_dry_run

        return show_dry_run(arguments)
    with leaving_when_interrupted():
        from converge_harness.cli.console import error_console, make_console
        from converge_harness.cli.plan_table import print_besides, print_plan, print_refusals
        from converge_harness.plan import describe
        from converge_harness.trainers import assume_toolchain
    made = plan_of(arguments, find=assume_toolchain)
    store = store_of(arguments)
    if arguments.script is not None:
        print(_script(made, store, arguments.script), end="")
        return ExitCode.PASS
    described = describe(made)
    per_node = _ranks_per_node(made, arguments.ranks_per_node)
    folders = store.run_folders()
    backend = _backend(made, store)
    commands = {
        job.name: f"is not run: {job.baseline}"
        if job.baseline is not None
        else _command(job, store.run_folder(job.name, job.identity, folders), backend, per_node)
        for job in made.jobs
    }
    console = make_console()
    refused = print_refusals(error_console() if arguments.json else console, made)
    if arguments.json:
        for line in _document_lines(_plan_document(made, described, commands)):
            print(line)
    else:
        print_plan(console, made, described, commands)
        print_besides(console, made)
    return ExitCode.USAGE if refused else ExitCode.PASS


def _require_cover(arguments: argparse.Namespace) -> None:
    """Without ``--cover``, refuse its options, and require an experiment."""
    problems = [
        Problem(f"--{option}", "needs --cover pairs")
        for option in ("gpus", "technique", "dp", "base", "toml")
        if getattr(arguments, option)
    ]
    if arguments.experiment is None and not problems:
        problems.append(
            Problem("EXPERIMENT", "is missing", "only --cover with --technique needs none")
        )
    if problems:
        raise ConfigError(problems)


def _require_dry_run(arguments: argparse.Namespace) -> None:
    """Refuse a dry run's options without ``--dry-run``, and ``--script`` with it."""
    problems = [
        Problem(f"--{option.replace('_', '-')}", "needs --dry-run")
        for option in ("throughput", "gpu_memory", "device")
        if not arguments.dry_run and getattr(arguments, option) is not None
    ]
    if arguments.dry_run and arguments.script is not None:
        problems.append(
            Problem("--script", "cannot be combined with --dry-run", "give one of them")
        )
    if problems:
        raise ConfigError(problems)


def _backend(made: Plan, store: Store) -> Backend | None:
    """The scheduler of the plan's jobs; None for jobs on this machine."""
    if made.experiment.cluster is None:
        return None
    from converge_harness.launch.backends import backend_of

    return backend_of(made.experiment.cluster, store)


def _command(job: Job, folder: Path, backend: Backend | None, per_node: int | None) -> str:
    """How a job is started: by torchrun, or by its batch script."""
    if backend is not None:
        return shlex.join(backend.submit_argv(folder.absolute()))
    from converge_harness.trainers import printable_command

    return printable_command(job, folder, per_node)


def _script(made: Plan, store: Store, name: str) -> str:
    """The batch script of the job of that name."""
    from converge_harness.cli.console import error_console
    from converge_harness.launch.scheduler.backend import ScriptRequest
    from converge_harness.run_folder.layout import JOB_SCRIPT

    cluster, backend = made.experiment.cluster, _backend(made, store)
    if cluster is None or backend is None:
        raise ConfigError(
            Problem(
                f"--script {name}", "jobs on this machine have no script", "add --launcher slurm"
            )
        )
    known = [job.name for job in made.jobs]
    if name not in known:
        raise ConfigError(Problem(f"--script {name}", "there is no such job", suggest(name, known)))
    job = made.job(name)
    folder = store.run_folder(job.name, job.identity).absolute()
    error_console().print(f"`converge submit` writes it as {folder / JOB_SCRIPT}", markup=False)
    request = ScriptRequest(job, folder, cluster, made.experiment.name)
    return backend.files(request)[JOB_SCRIPT]


def _ranks_per_node(made: Plan, asked: int | None) -> int | None:
    """Ranks on a node: as in the cluster, else as given, if the sets fill whole nodes."""
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


def _plan_document(
    made: Plan, described: Sequence[PlanRow], commands: Mapping[str, str]
) -> dict[str, Any]:
    from converge_harness.matrix.cost import cost_of

    return {
        "schema": 1,
        "experiment": str(made.experiment.path),
        "launcher": made.experiment.launcher.value,
        "cluster": made.experiment.cluster,
        "waived": list(made.waived),
        "left_out": {name: each.why for name, each in made.experiment.left_out.items()},
        "tokens": cost_of(made),
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
    """The document as JSON, one line per set and job: fast for thousands of them."""
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
    """A dataclass as a dict of its fields, without converting their values."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
