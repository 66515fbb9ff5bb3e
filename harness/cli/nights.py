"""A finished matrix into the history: whatever goes wrong there, the verdicts stand."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from harness import __version__
from harness.cli import matrix
from harness.cli.shared import say, store_of
from harness.errors import HistoryError
from harness.history import History, night_of
from harness.model import Launcher, Plan, RunRecord, Surroundings, Verdict
from harness.surroundings import checkout_commit, driver_version

FILE = "history.sqlite"
VARIABLE = "CONVERGE_HISTORY"


def history_of(arguments: argparse.Namespace) -> History:
    """The history that ``--history``, the environment or the store names."""
    named = arguments.history or os.environ.get(VARIABLE)
    return History(Path(named) if named else store_of(arguments).root / FILE)


def remember(
    console: Console,
    history: History,
    plan: Plan,
    records: Sequence[RunRecord],
    verdicts: Sequence[Verdict],
    *,
    surroundings: Surroundings,
    folder: Path,
    wall_s: float | None,
) -> None:
    """Add a night to the history, or say in one line why not."""
    source = plan.experiment.path.resolve()
    # The machine that submits to a cluster may have another driver than those that run.
    local = plan.experiment.launcher is Launcher.LOCAL
    on_gpu_here = local and surroundings.hardware.startswith("gpu")
    night = night_of(
        plan,
        records,
        verdicts,
        finished=datetime.now(UTC),
        source=str(source),
        report=str(folder.resolve()),
        circumstances={
            **matrix.versions_of(plan),
            "converge": __version__,
            "rank code": surroundings.rank_code[:12],
            "hardware": surroundings.hardware,
            "driver": driver_version() if on_gpu_here else "",
            "commit": checkout_commit(source.parent),
        },
        wall_s=wall_s,
    )
    try:
        added = history.append(night)
    except HistoryError as error:
        warning = f"warning: this night is missing from the history: {error}"
        say(console, warning, "yellow")
        return
    if added:
        say(console, f"history: {history.path}")
