"""Runs of a search: many in a row, of which the user sees only notices and restarts."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.matrix.run import Ran
    from converge_harness.model import Plan
    from converge_harness.store import Store

SHOWN = 160
"""Characters of a cause on one line."""


class RunningQuietly:
    """Runs plans with the options of a command line, and prints notices and restarts only.

    ``bars``: on a terminal, running jobs have a bar each. Not where something else is live there.
    """

    def __init__(
        self,
        console: Console,
        store: Store,
        arguments: argparse.Namespace,
        *,
        bars: bool = False,
    ) -> None:
        self._console, self._store, self._arguments = console, store, arguments
        self._bars = bars

    def __call__(self, plan: Plan, *, fresh: bool | None = None) -> Ran:
        """Reuse runs that have finished, unless ``fresh``; None: as the command line says."""
        from converge_harness.cli.progress import Display, noticing_launches
        from converge_harness.matrix.run import run_jobs

        display = Display(self._console, quiet=True)
        with display if self._bars else nullcontext():
            return run_jobs(
                plan,
                self._store,
                noticing_launches(display, self._arguments),
                fresh=self._arguments.fresh if fresh is None else fresh,
                warm=not self._arguments.cold,
            )


def short(text: str) -> str:
    """A text that fits on a line or two."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
