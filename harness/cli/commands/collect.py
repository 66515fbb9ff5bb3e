"""``converge collect``: judge a matrix whose jobs a scheduler has run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import EXIT_CODES, ExitCode, exit_code
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import (
    add_history_file,
    add_reports,
    history_of,
    names,
    report_folder,
    store_of,
)
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, scheduled_plan

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.launch.scheduler.job_status import JobStatus

HELP = "judge an experiment that was submitted"
DESCRIPTION = """\
Collect the jobs of a submitted experiment: write the records of those that have ended and, when all
have, calibrate, judge and report as `converge run` does, with the same exit codes. Otherwise list
the jobs that have not ended, judge nothing, and exit with 3."""
EPILOG = f"{EXAMPLES}\n\n{EXIT_CODES}"
NOT_DONE = ""

_LISTED = 12
"""At most so many unfinished jobs are listed."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_plan(parser)
    add_reports(parser)
    add_history_file(parser)
    parser.add_argument(
        "--partial",
        action="store_true",
        help="judge what has ended already; a set whose jobs have not ended has no verdict, and "
        "the exit code is 1 or 3",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge collect``: exit codes as of ``run``, and 3 while some job has not ended."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
        from converge_harness.cli.progress import Display
        from converge_harness.matrix.calibrate import read_given
        from converge_harness.matrix.conclude import conclude
        from converge_harness.matrix.submit import collect_jobs, collected_run
        from converge_harness.store import require_writable
    console = make_console()
    plan = scheduled_plan(arguments)
    given = read_given(plan)
    store = store_of(arguments)
    store.require_writable()
    folder = report_folder(arguments, plan.experiment)
    require_writable(folder)
    with Display(console) as display:
        collected = collect_jobs(plan, store, display)
    if collected.left:
        _say_left(console, collected.left, arguments)
        if not arguments.partial or not collected.records:
            return ExitCode.UNDECIDED
    ran = collected_run(plan, collected, store)
    history = history_of(arguments)
    finished = not collected.left
    judged = conclude(
        plan,
        ran,
        folder,
        store=store,
        given=given,
        selected=names(arguments.only),
        save=finished,
    )
    from converge_harness.cli.verdicts import add_night, show_verdicts

    show_verdicts(console, judged.view, folder)
    if finished:  # with --partial the matrix is not finished: no night
        add_night(console, history, plan, ran.records, judged.verdicts, folder=folder, wall_s=None)
    code = exit_code(judged.verdicts)
    return ExitCode.UNDECIDED if collected.left and code is ExitCode.PASS else code


def _say_left(console: Console, left: Sequence[JobStatus], arguments: argparse.Namespace) -> None:
    from converge_harness.cli.console import say
    from converge_harness.matrix.submit import state_of
    from converge_harness.wording import counted

    say(console, f"{counted(len(left), 'job')} {'has' if len(left) == 1 else 'have'} not ended:")
    for each in left[:_LISTED]:
        say(console, f"  {each.job.name}: {state_of(each)}")
    if len(left) > _LISTED:
        say(console, f"  and {len(left) - _LISTED} more")
    new = any(not each.in_queue for each in left)
    say(console, f"next: {again('submit' if new else 'status', arguments)}")
