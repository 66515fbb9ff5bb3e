"""``converge submit``: submit a matrix's jobs without waiting for them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import store_of
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, mend, scheduled_plan
from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Launcher, RunStatus

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.model import Plan

HELP = "submit an experiment's jobs to Slurm, or write them for Kubernetes"
DESCRIPTION = """\
Submit every job of an experiment to Slurm and return; you may close the shell. Finished jobs are
not run again, and jobs in the queue are not submitted again, so the command can be repeated safely;
failed jobs are submitted again. Test sets wait for the seed checkpoint that they start from, and
for nothing else. All that is needed to find the jobs again is in their run folders.

With `--launcher kubernetes` every job is written as a JobSet that `kubectl create` takes, and the
commands that create them are printed: converge itself never asks Kubernetes. Each object is
first checked with the models of Kubeflow Trainer's Python client."""
EPILOG = EXAMPLES
NOT_DONE = ", nothing was launched"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_plan(parser)
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity; jobs in the "
        "queue are left alone",
    )
    parser.add_argument(
        "--objects",
        type=Path,
        metavar="DIR",
        help="where the objects of Kubernetes go (default: kubernetes/NAME of the experiment)",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge submit``: exit code 0 when all jobs that needed it were submitted."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console, say
        from converge_harness.cli.plan_table import print_left_out
        from converge_harness.cli.progress import Display, noticing_launches
        from converge_harness.matrix.submit import submit_jobs
    console = make_console()
    plan = scheduled_plan(arguments)
    objects = _objects(plan, arguments.objects)
    store = store_of(arguments)
    store.require_writable()
    print_left_out(console, plan)
    with Display(console) as display:
        observer = noticing_launches(display, arguments)
        submitted = submit_jobs(plan, store, observer, fresh=arguments.fresh, objects=objects)
    counts = [f"{submitted.submitted} {'submitted' if objects is None else 'written'}"]
    before = "already in the queue" if objects is None else "written before, and not over"
    counts += [f"{submitted.queued} {before}"] if submitted.queued else []
    counts += [f"{submitted.reused} already finished"] if submitted.reused else []
    counts += [f"{len(submitted.refused)} refused or skipped"] if submitted.refused else []
    say(console, f"jobs: {', '.join(counts)}")
    if submitted.left:
        say(console, f"{len(submitted.left)} are not submitted: {submitted.why_left}")
        say(console, f"to submit them later: {again('submit', arguments)}")
    refusals = [
        record.error.message if record.error else ""
        for record in submitted.refused
        if record.status is RunStatus.REFUSED
    ]
    if refusals:
        say(console, f"next: {mend(plan, refusals)}, then: {again('submit', arguments)}")
    elif objects is not None and submitted.submitted:
        _say_how_to_create(console, plan, objects, submitted.again)
        say(console, f"then: {again('collect', arguments)}")
    elif submitted.submitted or submitted.queued:
        say(console, f"next: {again('status', arguments)}")
    elif not submitted.left:
        say(console, f"next: {again('collect', arguments)}")
    return ExitCode.UNDECIDED if submitted.left or submitted.refused else ExitCode.PASS


def _objects(plan: Plan, given: Path | None) -> Path | None:
    """The folder for objects of Kubernetes; None for Slurm. Raises ConfigError."""
    if plan.experiment.launcher is Launcher.KUBERNETES:
        from converge_harness.store import folder_name

        return given or Path("kubernetes") / folder_name(plan.experiment.name)
    if given is not None:
        raise ConfigError(
            Problem(
                f"--objects {given}",
                "has no effect: Slurm gets batch scripts",
                "add --launcher kubernetes",
            )
        )
    return None


def _say_how_to_create(console: Console, plan: Plan, objects: Path, again: Sequence[str]) -> None:
    """The kubectl commands that create the objects, after those that delete failed ones.

    Seed checkpoints may have been created before, for which kubectl fails, so nothing but the wait
    decides whether the others are created.
    """
    from converge_harness.cli.console import say
    from converge_harness.launch.kubernetes.objects import delete_command
    from converge_harness.launch.kubernetes.written import RUNS, SEEDS

    folders = [shlex.quote(str(objects / when)) for when in (SEEDS, RUNS)]
    seeds, runs = (
        folder if any((objects / when).glob("*.json")) else None
        for folder, when in zip(folders, (SEEDS, RUNS), strict=True)
    )
    create = [f"kubectl create -f {folder}" for folder in (seeds, runs) if folder]
    if seeds and runs:
        wait = f"kubectl wait --for=condition=Completed --timeout=24h -f {seeds}"
        create = [f"{create[0]}; {wait} && {create[1]}"]
    site = plan.experiment.cluster and plan.experiment.cluster.kubernetes
    if site and again:  # the failed JobSet still has the name
        create.insert(0, f"{shlex.join(delete_command(site.namespace, again))} &&")
    say(console, f"next: {' '.join(create)}")
