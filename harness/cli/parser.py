"""The parser, assembled from the commands, and the help that says what the program is for."""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

from converge_harness import __version__
from converge_harness.cli.exit_codes import EXIT_CODES, ExitCode

DESCRIPTION = """\
Does the model still learn the same thing? converge runs an experiment matrix (one control set,
believed correct, and test sets: other parallelisms, techniques, releases), judges every test set
against the control, names the likely cause of a difference, and writes reports."""

COMMANDS = (
    *("run", "submit", "status", "collect", "cancel", "calibrate", "bless", "plan", "init"),
    *("compare", "report", "shrink", "bisect", "repro", "export", "history", "notify", "toolchain"),
)
"""Every command, in the order of the help: each is the module of its name in ``commands/``."""


class CommandModule(Protocol):
    """What a module in ``commands/`` has. Its imports are light: the parser imports all of them."""

    HELP: str
    """Its line in the list of commands."""
    DESCRIPTION: str
    EPILOG: str
    NOT_DONE: str
    """What it left undone because of problems, as ``, nothing was launched``; may be empty."""

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its arguments."""

    def run(self, arguments: argparse.Namespace) -> ExitCode:
        """Run it. Heavy imports belong here, under ``leaving_when_interrupted``."""


def command(name: str) -> CommandModule:
    """The command of that name."""
    return cast("CommandModule", importlib.import_module(f"converge_harness.cli.commands.{name}"))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="converge",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"converge {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        each = command(name)
        each.arguments(
            subparsers.add_parser(
                name,
                help=each.HELP,
                description=each.DESCRIPTION,
                epilog=each.EPILOG,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser
