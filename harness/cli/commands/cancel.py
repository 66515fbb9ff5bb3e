"""``converge cancel``: take a matrix's jobs out of the queue."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import names, store_of
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, scheduled_plan
from converge_harness.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.model import Plan

HELP = "take an experiment's jobs out of the queue"
DESCRIPTION = """\
Cancel the Slurm jobs of an experiment, running or pending. What they have done so far stays in
their run folders; `converge submit` runs them again.

With `--launcher kubernetes` it prints the command that deletes their JobSets: converge itself never
asks Kubernetes. Once that command has returned, `--deleted` tells converge that they are gone."""
EPILOG = EXAMPLES
NOT_DONE = ", nothing was cancelled"

ONLY_JOBS = """\
only the jobs of these sets: test sets, or jobs by the names that `converge status` shows"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_plan(parser, ONLY_JOBS)
    parser.add_argument(
        "--deleted",
        action="store_true",
        help="count these jobs as over: you have deleted their JobSets, or seen that they failed",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge cancel``: exit code 0 when all the named jobs have ended."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console, say
        from converge_harness.cli.progress import Display
        from converge_harness.matrix.submit import cancel_jobs
        from converge_harness.wording import counted
    console = make_console()
    plan = scheduled_plan(arguments, whole=True)
    cluster = plan.experiment.cluster
    site = cluster.kubernetes if cluster else None
    if arguments.deleted and site is None:
        raise ConfigError(
            Problem("--deleted", "has no effect: Slurm is asked", "add --launcher kubernetes")
        )
    if site is not None and not arguments.deleted:
        return _say_how_to_delete(console, plan, site.namespace, arguments)
    with Display(console) as display:
        done = cancel_jobs(plan, store_of(arguments), display, names(arguments.only))
    count = len(done.cancelled) + len(done.ending)
    say(
        console,
        f"{counted(count, 'job')} cancelled" if count else "none of its jobs is in the queue",
    )
    if done.ending:
        left = ", ".join(each.job.name for each in done.ending)
        say(console, f"not ended yet: {left}; see {again('status', arguments)}")
    for each in done.unsure:
        if site is not None:
            _say_it_was_interrupted(console, each.job.name, arguments)
        elif each.submission is not None:
            say(
                console,
                f"{each.job.name}: its submission was interrupted; if Slurm has it, this cancels "
                f"it: scancel --name={shlex.quote(each.submission.name)}",
            )
    return ExitCode.UNDECIDED if done.ending or done.unsure else ExitCode.PASS


def _say_it_was_interrupted(console: Console, name: str, arguments: argparse.Namespace) -> None:
    """A job whose object was perhaps written, but was never printed to be created."""
    from converge_harness.cli.console import say

    repeat = again("submit", arguments)
    say(console, f"{name}: its submission was interrupted; to repeat it: {repeat}")


def _say_how_to_delete(
    console: Console, plan: Plan, namespace: str, arguments: argparse.Namespace
) -> ExitCode:
    """Print the commands that cancel jobs of Kubernetes, those that the arguments name."""
    from converge_harness.cli.console import say
    from converge_harness.cli.progress import Display
    from converge_harness.launch.kubernetes.objects import delete_command
    from converge_harness.launch.scheduler.backend import Phase
    from converge_harness.launch.scheduler.detached import BROKEN_OFF
    from converge_harness.matrix.submit import jobs_named, jobs_status

    wanted = {job.name for job in filter(jobs_named(plan, names(arguments.only)), plan.jobs)}
    in_queue = (str(Phase.PENDING), str(Phase.RUNNING))
    rows = jobs_status(plan, store_of(arguments), Display(console))
    ids = [row.job_id for row in rows if row.name in wanted and row.state in in_queue]
    interrupted = [row.name for row in rows if row.name in wanted and row.state == BROKEN_OFF]
    for name in interrupted:
        _say_it_was_interrupted(console, name, arguments)
    if interrupted and not ids:
        return ExitCode.UNDECIDED
    if not ids:
        say(console, "none of its jobs is in the queue")
        return ExitCode.PASS
    say(console, f"next: {shlex.join(delete_command(namespace, ids))}")
    say(console, f"then: {again('cancel', arguments)} --deleted")
    return ExitCode.UNDECIDED
