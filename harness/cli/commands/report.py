"""``converge report``: judge a finished matrix again, without training."""

from __future__ import annotations

import argparse
from pathlib import Path

from converge_harness.cli.exit_codes import ExitCode, exit_code
from converge_harness.cli.leaving import leaving_when_interrupted

HELP = "judge and write the reports of a finished matrix again"
DESCRIPTION = "Judge a finished matrix again and rewrite its reports, without training."
EPILOG = ""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of a run")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Exit code by the verdicts."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console
        from converge_harness.matrix.against import read_against, shown_with
        from converge_harness.matrix.conclude import conclude_again
        from converge_harness.matrix.operations import read_findings, with_findings
    finished, _, judged = conclude_again(arguments.folder)
    from converge_harness.cli.verdicts import show_verdicts

    against = read_against(arguments.folder)
    view = with_findings(judged.view, read_findings(arguments.folder))
    show_verdicts(make_console(), shown_with(view, finished.plan, against), arguments.folder)
    return exit_code(judged.verdicts, against)
