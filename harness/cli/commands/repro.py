"""``converge repro``: a failed test set as a folder that somebody else can run."""

from __future__ import annotations

import argparse
from pathlib import Path

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted

HELP = "write a failed test set as a folder that others can run, with a draft of an issue"
DESCRIPTION = """\
Write one failed test set of a report as a folder of its own: the experiment with its train config
and copies of the code that it names, requirements, a script, what to expect, and ISSUE.md, the
draft of an issue for an upstream project. Shrink the set first: an issue should be small."""
EPILOG = """\
example:
  converge shrink experiments/known_bugs.toml --set pp_gradient_scale
  converge run reports/shrunk/pp_gradient_scale/experiment.toml
  converge repro reports/pp_gradient_scale-shrunk --set pp_gradient_scale"""
NOT_DONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("report", type=Path, metavar="REPORT", help="the --out folder of a run")
    parser.add_argument("--set", required=True, metavar="NAME", help="the failed test set")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder (default: reports/repro/NAME)"
    )
    parser.add_argument(
        "--bisected",
        type=Path,
        metavar="DIR",
        help="folder of `converge bisect` of the same set: the draft names the commit it found",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
    """0 once the folder is written."""
    with leaving_when_interrupted():
        from converge_harness.cli.console import make_console, say
        from converge_harness.matrix.repro import ISSUE, SCRIPT, write_repro
    console = make_console()
    out = arguments.out or Path("reports") / "repro" / arguments.set
    written = write_repro(arguments.report, arguments.set, out, arguments.bisected)
    for path in written.files:
        say(console, str(path))
    for clause in written.warnings:
        say(console, f"warning: others cannot use it as it is: {clause}", "yellow")
    say(console, f"next: read {out / ISSUE}, and try it: bash {out / SCRIPT} in a new environment")
    return ExitCode.PASS
