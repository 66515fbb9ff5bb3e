"""What several commands read from their arguments, and how wide they print."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.cli.console import PlainConsole
from harness.model import Experiment
from harness.store import Store, default_root, folder_name

WIDE = 120
"""Characters from which the whole verdict table is readable; also the width of CI logs."""


def make_console() -> Console:
    """A console as wide as its terminal, or wide enough for a log."""
    console = PlainConsole(highlight=False)
    return console if console.is_terminal else PlainConsole(highlight=False, width=WIDE)


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Print a text as it is: what users name may look like markup, and a terminal wraps lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def names(only: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Values of an option that may be given again, each time with several."""
    return tuple(chain.from_iterable(only))


def report_folder(arguments: argparse.Namespace, experiment: Experiment) -> Path:
    """Where the reports of a matrix, or of a part of it, go: ``--out``, or a folder of its own.

    A part never takes the place of the whole.
    """
    if arguments.out is not None:
        return Path(arguments.out)
    whole = Path("reports") / folder_name(experiment.name)
    only = sorted(set(names(arguments.only)))
    return whole / "only" / folder_name(*only) if only else whole


def store_of(arguments: argparse.Namespace) -> Store:
    """The store that ``--store``, the environment or the default names."""
    return Store(arguments.store or default_root(os.environ))
