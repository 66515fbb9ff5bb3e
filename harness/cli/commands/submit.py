"""``converge submit``: a matrix's jobs to a scheduler, without waiting for them."""

from __future__ import annotations

import argparse

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import store_of
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, mend, scheduled_plan
from converge_harness.model import RunStatus

HELP = "give an experiment's jobs to Slurm"
DESCRIPTION = """\
Give every job of an experiment to Slurm and return: the shell may end. Jobs that have finished are
not run again, and jobs in the queue are not submitted again, so the same command may be given as
often as you like; a job that has failed is. Test sets wait for the seed checkpoint that they start
from, and for nothing else. All that is needed to find them stands in their run folders."""
EPILOG = EXAMPLES
UNDONE = ", nothing was launched"


def arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add_plan(parser)
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity; jobs in the "
        "queue are left alone",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge submit``: exit code 0 when the scheduler has all that was to be submitted."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console, say
        from converge_harness.cli.progress import Display, noticing_launches
        from converge_harness.matrix.submit import submit_jobs
    console = make_console()
    plan = scheduled_plan(arguments)
    store = store_of(arguments)
    store.require_writable()
    with Display(console) as display:
        observer = noticing_launches(display, arguments)
        submitted = submit_jobs(plan, store, observer, fresh=arguments.fresh)
    told = [f"{submitted.submitted} submitted"]
    told += [f"{submitted.queued} in the queue before"] if submitted.queued else []
    told += [f"{submitted.reused} finished before"] if submitted.reused else []
    told += [f"{len(submitted.refused)} refused or skipped"] if submitted.refused else []
    say(console, f"jobs: {', '.join(told)}")
    if submitted.left:
        say(console, f"{len(submitted.left)} are not submitted: {submitted.why_left}")
        say(console, f"the same command submits them later: {again('submit', arguments)}")
    if any(record.status is RunStatus.REFUSED for record in submitted.refused):
        say(console, f"next: {mend(plan)}, then: {again('submit', arguments)}")
    elif submitted.submitted or submitted.queued:
        say(console, f"next: {again('status', arguments)}")
    elif not submitted.left:
        say(console, f"next: {again('collect', arguments)}")
    return ExitCode.UNDECIDED if submitted.left or submitted.refused else ExitCode.PASS
