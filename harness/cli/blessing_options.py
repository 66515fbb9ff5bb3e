"""The arguments of ``converge bless``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from harness.errors import ConfigError, Problem

BLESS = """\
Store the control of an experiment as golden: its curves, digests and sketches, what its repeats
taught, versions, and who takes it for right. What has finished is not run again. An experiment
with `baseline = "NAME"` is then judged against it without running the control. To bless again is to
be told first what has changed since: bitwise (nothing), rounding-like, or semantic."""

BLESS_EXAMPLES = """\
examples:
  converge bless experiments/smoke.toml --name smoke --author ada --reason "first release"
  converge bless experiments/smoke.toml --name smoke --author ada --reason "mask mended" \\
    --accept-semantic-change
  converge bless --show            # all goldens
  converge bless --show smoke      # one, and those that were there before

exit codes: 0 stored or shown; 1 the control trains otherwise than the golden of that name; 2 usage
or configuration error; 3 the control cannot be blessed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def golden_name(name: str) -> str:
    """A name that is a folder everywhere.

    Raises ConfigError for any other.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            Problem(f"--name {name}", "letters, digits, dots, dashes and underscores make a name")
        )
    return name


def add_bless(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_common: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the command; ``add_common`` adds what all commands that run jobs take."""
    bless = commands.add_parser(
        "bless",
        help="store a control as golden, to be judged against without running it",
        description=BLESS,
        epilog=BLESS_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bless.add_argument("experiment", type=Path, nargs="?", metavar="EXPERIMENT")
    bless.add_argument("--name", metavar="NAME", help="of the golden, a folder under baselines/")
    bless.add_argument("--author", metavar="WHO", help="who takes the control for right")
    bless.add_argument("--reason", metavar="WHY", help="why it may be trusted")
    bless.add_argument("--control", metavar="NAME", help="which control (default: the [control])")
    bless.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the folder of goldens (default: baselines/ beside the experiments)",
    )
    bless.add_argument(
        "--accept-semantic-change",
        action="store_true",
        help="bless although the control trains otherwise than the golden of that name",
    )
    bless.add_argument(
        "--show",
        nargs="?",
        const="",
        metavar="NAME",
        help="show a golden and those before it, or without NAME list all; nothing is run",
    )
    add_common(bless)
