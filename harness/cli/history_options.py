"""What ``converge history`` takes, and the help that teaches it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.model import Judgement

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - it has no name

HISTORY = """\
List what `converge run` and `converge collect` found on other nights: one line per night and test
set, newest first. With --html, draw the deviations of every test set over the nights, and mark
where they went to another level: the first bad night, and what changed before it (torch,
torchtitan, torchao, driver, commit …)."""

EXAMPLES = """\
examples:
  converge history
  converge history smoke --test fsdp2_tp2 --limit 10
  converge history experiments/smoke.toml --verdict FAIL --since 2026-11-01 --json
  converge history smoke --html history.html"""


def add_history(
    commands: Commands,
    add_store: Callable[[argparse.ArgumentParser], None],
    positive: Callable[[str], int],
) -> None:
    history = commands.add_parser(
        "history",
        help="list the verdicts of other nights, or draw their trends",
        description=HISTORY,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    history.add_argument(
        "experiment",
        nargs="?",
        metavar="EXPERIMENT",
        help="only nights of this experiment: its name, or its file",
    )
    history.add_argument("--test", metavar="NAME", help="only this test set")
    history.add_argument(
        "--verdict",
        type=_verdict,
        metavar="WORD",
        help=f"only this verdict: {', '.join(Judgement)}",
    )
    history.add_argument(
        "--since",
        type=_time,
        metavar="DATE",
        help="only nights from then on: 2026-11-01, or with a time, 2026-11-01T06:00 (local time "
        "unless it has an offset)",
    )
    history.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help="at most the N newest results (default 50); with --html, nights of a set (default "
        "365)",
    )
    how = history.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print JSON, with what the checks found")
    how.add_argument(
        "--html", type=Path, metavar="FILE", help="write the trends as one page that needs nothing"
    )
    add_store(history)
    add_history_file(history)


def add_history_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history",
        type=Path,
        metavar="FILE",
        help="the history file (default: $CONVERGE_HISTORY, or history.sqlite in the store)",
    )


def _verdict(text: str) -> Judgement:
    try:
        return Judgement(text.upper())
    except ValueError:
        words = ", ".join(Judgement)
        raise argparse.ArgumentTypeError(f"{text!r} is no verdict: give one of {words}") from None


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no date: write 2026-11-01 or 2026-11-01T06:00"
        ) from None
