"""The options of ``converge notify``, with their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

NOTIFY = """\
Write what a person should be told of a night, as Markdown for an issue, a comment or a mail: test
sets that are bad for the first time since they last passed, with their cause, their last good night
and what has changed since then. A set that stays bad in the same way is told of once; on a night
without news no file is written, and one that an earlier night left is removed. With --experiment,
a night that left no report (nothing was launched, or it was cut off) is told of, too, and not again
on the next such night. What the matrix comes to says the exit code of `converge run`; this one is 0
either way."""


def add_notify(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    add_store: Callable[[argparse.ArgumentParser], None],
    add_history_file: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add ``converge notify``."""
    notify = commands.add_parser(
        "notify",
        help="write a message about a night that is bad for the first time",
        description=NOTIFY,
        epilog="example: converge notify reports/smoke --experiment experiments/smoke.toml --body "
        "message.md && [ ! -f message.md ] || gh issue create --title 'smoke is bad' --body-file "
        "message.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    notify.add_argument("folder", type=Path, metavar="DIR", help="the --out folder of the night")
    notify.add_argument(
        "--body", type=Path, required=True, metavar="FILE", help="where the message goes"
    )
    notify.add_argument(
        "--experiment",
        type=Path,
        metavar="FILE",
        help="of the night, so that one without a report is told of",
    )
    notify.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="what `converge run` said: quoted in the message of a night without a report",
    )
    add_store(notify)
    add_history_file(notify)
