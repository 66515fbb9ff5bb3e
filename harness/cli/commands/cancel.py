"""``converge cancel``: take a matrix's jobs out of the queue."""

from __future__ import annotations

import argparse
import shlex

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import names, store_of
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, counted, scheduled_plan

HELP = "take an experiment's jobs out of the queue"
DESCRIPTION = """\
Cancel the Slurm jobs of an experiment, running or pending. What they have done so far stays in
their run folders; `converge submit` runs them again."""
EPILOG = EXAMPLES
UNDONE = ", nothing was cancelled"

ONLY_JOBS = """\
only the jobs of these sets: test sets, or jobs by the names that `converge status` shows"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_plan(parser, ONLY_JOBS)


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge cancel``: exit code 0 when all the named jobs have ended."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console, say
        from converge_harness.cli.progress import Display
        from converge_harness.matrix.submit import cancel_jobs
    console = make_console()
    plan = scheduled_plan(arguments, whole=True)
    with Display(console) as display:
        done = cancel_jobs(plan, store_of(arguments), display, names(arguments.only))
    count = len(done.cancelled) + len(done.ending)
    say(console, f"{counted(count)} cancelled" if count else "none of its jobs is in the queue")
    if done.ending:
        left = ", ".join(each.job.name for each in done.ending)
        say(console, f"not ended yet: {left}; see {again('status', arguments)}")
    for each in done.unsure:
        if each.submission is not None:
            say(
                console,
                f"{each.job.name}: its submission was interrupted; if Slurm has it, this cancels "
                f"it: scancel --name={shlex.quote(each.submission.name)}",
            )
    return ExitCode.UNDECIDED if done.ending or done.unsure else ExitCode.PASS
