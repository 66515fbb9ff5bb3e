"""``converge status``: the state of a matrix's jobs."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.options import store_of
from converge_harness.cli.scheduled import EXAMPLES, add_plan, again, mend, scheduled_plan
from converge_harness.model import Role, RunStatus

if TYPE_CHECKING:
    from converge_harness.launch.scheduler.detached import StatusRow

HELP = "show the state of an experiment's jobs"
DESCRIPTION = """\
Show the state of every job of an experiment: its state in Slurm and why it is pending (on
Kubernetes, by what its first pod has written), how many steps it has finished, and its loss.
Nothing is written. It works from any shell, whoever submitted the jobs, and whether or not a
`converge run` is waiting for them."""
EPILOG = EXAMPLES
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    add_plan(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """``converge status``: print a table; exit code 0 whatever the states."""
    with leaving_when_interrupted():
        from rich.markup import escape
        from rich.table import Table

        from converge_harness.cli.console import make_console, say
        from converge_harness.cli.progress import Display
        from converge_harness.launch.scheduler.backend import Phase
        from converge_harness.launch.scheduler.detached import BROKEN_OFF, NOT_SUBMITTED
        from converge_harness.matrix.submit import jobs_status
    console = make_console()
    plan = scheduled_plan(arguments)
    rows = jobs_status(plan, store_of(arguments), Display(console))
    table = Table(title=escape(plan.experiment.name), title_justify="left", show_edge=False)
    for title in ("set", "job", "state"):
        table.add_column(title, overflow="fold")
    for title in ("steps", "loss", "elapsed"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("nodes", "reason"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(
            escape(row.name),
            row.job_id,
            escape(row.state if row.recorded else f"{row.state}, not collected"),
            _steps(row),
            "" if row.loss is None else f"{row.loss:.4f}",
            "" if row.elapsed_s is None else _duration(row.elapsed_s),
            escape(row.nodes),
            escape(_reason(row)),
        )
    console.print(table)
    counts = Counter(row.state for row in rows)
    say(console, "\n" + ", ".join(f"{count} {state}" for state, count in counts.items()))
    not_over = {str(Phase.PENDING), str(Phase.RUNNING), NOT_SUBMITTED, BROKEN_OFF}
    over = all(row.state not in not_over for row in rows)
    if over and counts[RunStatus.REFUSED]:
        refusals = [row.reason for row in rows if row.state == RunStatus.REFUSED]
        say(console, f"next: {mend(plan, refusals)}, then: {again('submit', arguments)}")
    elif over and (counts[RunStatus.CANCELLED] or counts[RunStatus.INTERRUPTED]):
        say(console, f"next, to run the rest: {again('submit', arguments)}")
        say(console, f"or to judge what has finished: {again('collect', arguments)}")
    elif over or any(not row.recorded for row in rows):
        say(console, f"next: {again('collect', arguments)}")
    elif counts[NOT_SUBMITTED] or counts[BROKEN_OFF]:
        say(console, f"next: {again('submit', arguments)}")
    return ExitCode.PASS


def _reason(row: StatusRow) -> str:
    from converge_harness.cli.progress import requeued

    notes = [requeued(row.requeues)] if row.requeues else []
    return "; ".join([*notes, row.reason] if row.reason else notes)


def _steps(row: StatusRow) -> str:
    if row.role is Role.SEED:
        return ""
    return f"{row.step or 0}/{row.steps}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
