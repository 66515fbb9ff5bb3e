"""``converge toolchains``: the environments that an experiment needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from converge_harness.cli.exit_codes import ExitCode
from converge_harness.cli.leaving import leaving_when_interrupted

HELP = "list the toolchains that an experiment needs"
DESCRIPTION = """\
Print the toolchains (Python environments) that an experiment needs, one a line. Build a missing one
with: nox -s toolchain -- NAME"""
EPILOG = ""
UNDONE = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add its arguments."""
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Their names, one a line."""
    with leaving_when_interrupted():
        from converge_harness.experiment import load_experiment
        from converge_harness.matrix.load import toolchain_names
    for name in toolchain_names(load_experiment(arguments.experiment)):
        print(name)
    return ExitCode.PASS
