"""Arguments to a command, errors to an exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from converge_harness.cli.exit_codes import GIT_BISECT, ExitCode, for_git_bisect
from converge_harness.cli.leaving import leaving_when_interrupted
from converge_harness.cli.parser import build_parser, command
from converge_harness.errors import ConfigError, ConvergeError, Interrupted

if TYPE_CHECKING:
    from rich.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (:class:`~cli.exit_codes.ExitCode`)."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # before the command began, or once more while it ended
        return ExitCode.INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    asked = sys.argv[1:] if argv is None else argv
    try:
        code = _command(build_parser().parse_args(argv))
    except SystemExit as error:  # of argparse: --help, or an option that it does not know
        code = error.code if isinstance(error.code, int) else ExitCode.USAGE
        if GIT_BISECT not in asked:
            raise
    return for_git_bisect(code) if GIT_BISECT in asked else code


def _command(arguments: argparse.Namespace) -> int:
    # Imported here: `converge --help` ends in the line before, and should not pay for rich.
    with leaving_when_interrupted():
        from converge_harness.cli.console import error_console
        from converge_harness.wording import counted
    errors = error_console()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(command(arguments.command).run(arguments))
    except ConfigError as error:
        launched = _launched(arguments)
        done = "" if launched else command(arguments.command).NOT_DONE
        errors.print(f"{counted(len(error.problems), 'problem')}{done}:", style="bold red")
        for problem in error.problems:
            errors.print(f"  {problem}", markup=False)
        return _cut_off(errors) if launched else ExitCode.USAGE
    except (KeyboardInterrupt, Interrupted):
        errors.print("interrupted; finished runs are kept: run the same command again to continue")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # `converge plan … | head` closed our output: no error, and nobody would read a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PASS
    except (ConvergeError, OSError) as error:
        # A file-system error is not a bug in converge: a name too long, a folder that is a file.
        errors.print("error: ", style="bold red", end="")
        errors.print(str(error), markup=False)
        return _cut_off(errors) if _launched(arguments) else ExitCode.USAGE
    except Exception:  # noqa: BLE001 - a gate must not read our bug as a FAIL of the training
        errors.print_exception()
        errors.print("this is a bug in converge, not a verdict; please report it", style="bold red")
        return ExitCode.UNDECIDED


def _launched(arguments: argparse.Namespace) -> bool:
    """Whether the command has started or submitted a job (``progress.noticing_launches``)."""
    return getattr(arguments, "launched", False)


def _cut_off(errors: Console) -> ExitCode:
    """Report an error, such as a full disk, that came after jobs had been launched."""
    errors.print("no verdict; finished runs are kept: run the same command again to continue")
    return ExitCode.UNDECIDED


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
