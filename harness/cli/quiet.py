"""Runs of a search: many in a row, of which a person sees only what they have to know of."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from converge_harness.launch.events import Event
    from converge_harness.matrix.run import Ran
    from converge_harness.model import Plan
    from converge_harness.store import Store

SHOWN = 160
"""Characters of a cause on one line."""


class RunningQuietly:
    """Runs plans with the options of a command line, and prints notices and restarts only."""

    def __init__(self, console: Console, store: Store, arguments: argparse.Namespace) -> None:
        self._console, self._store, self._arguments = console, store, arguments

    def __call__(self, plan: Plan, *, fresh: bool | None = None) -> Ran:
        """Reuse runs that have finished, unless ``fresh``; None: as the command line says."""
        from converge_harness.cli.progress import noticing_launches
        from converge_harness.matrix.run import run_jobs

        return run_jobs(
            plan,
            self._store,
            noticing_launches(self._tell, self._arguments),
            fresh=self._arguments.fresh if fresh is None else fresh,
            warm=not self._arguments.cold,
        )

    def _tell(self, event: Event) -> None:
        from converge_harness.cli.progress import line
        from converge_harness.launch.events import Notice, Retrying

        if isinstance(event, Notice):
            self._console.print(line(event)[0], style="yellow", markup=False, soft_wrap=True)
        elif isinstance(event, Retrying):
            self._console.print(f"{event.job.name}: starting again, because {event.reason}")


def short(text: str) -> str:
    """A text that fits on a line or two."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
