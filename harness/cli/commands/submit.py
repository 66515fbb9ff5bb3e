"""``converge submit``: submit a matrix's jobs without waiting for them."""

from __future__ import annotations

import argparse

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import store_of
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, mend, scheduled_plan
from converge_harness.model import RunStatus

HELP = "submit an experiment's jobs to Slurm"
DESCRIPTION = """\
Submit every job of an experiment to Slurm and return; you may close the shell. Finished jobs are
not run again, and jobs in the queue are not submitted again, so the command can be repeated safely;
failed jobs are submitted again. Test sets wait for the seed checkpoint that they start from, and
for nothing else. All that is needed to find the jobs again is in their run folders."""
EPILOG = EXAMPLES
UNDONE = ", nothing was launched"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_plan(parser)
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="run everything again, even what has finished with the same identity; jobs in the "
        "queue are left alone",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge submit``: exit code 0 when every job that had to be was submitted."""
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
    counts = [f"{submitted.submitted} submitted"]
    counts += [f"{submitted.queued} already in the queue"] if submitted.queued else []
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
    elif submitted.submitted or submitted.queued:
        say(console, f"next: {again('status', arguments)}")
    elif not submitted.left:
        say(console, f"next: {again('collect', arguments)}")
    return ExitCode.UNDECIDED if submitted.left or submitted.refused else ExitCode.PASS
