"""Runs of Weights & Biases, online or offline, one per control, repeat and test set."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from harness.errors import StoreError, installing
from harness.export.curves import ExportedRun


def write_wandb(
    runs: Sequence[ExportedRun], folder: Path, *, project: str, group: str, offline: bool
) -> list[Path]:
    """Log every run to a project, grouped; return the runs' own folders below ``folder``/wandb.

    Offline, nothing leaves this machine: ``wandb sync FOLDER`` sends it later. A NaN or infinity
    stays one. Every call makes new runs.

    Raises StoreError when wandb is not installed, is not logged in, or cannot be reached.
    """
    try:
        import wandb  # noqa: PLC0415 # imported on use: the light part works without it
    except ImportError as error:
        raise StoreError(
            f"{folder}: writing for Weights & Biases needs wandb: {installing('wandb')}"
        ) from error
    # It may print only what went wrong, and need not watch this process: nothing trains in it.
    settings = wandb.Settings(
        console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for run in runs:
        try:
            with wandb.init(
                project=project,
                group=group,
                name=run.name,
                job_type=str(run.role),
                config=dict(run.facts),
                dir=str(folder),
                mode="offline" if offline else None,
                reinit="create_new",
                settings=settings,
            ) as logged:
                for step, values in _by_step(run).items():
                    logged.log(values, step=step)
                made.append(Path(logged.dir).parent)
        except wandb.Error as error:
            raise StoreError(
                f"{run.name} could not be logged to Weights & Biases: {error}; log in with "
                "`wandb login`, or write without a connection with --offline"
            ) from error
    return made


def _by_step(run: ExportedRun) -> dict[int, dict[str, float]]:
    """What is logged at once: steps only ever grow, else wandb drops them."""
    steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for tag, points in run.curves.items():
        for step, value in zip(points.steps.tolist(), points.values.tolist(), strict=True):
            steps[step][tag] = value
    for step, seconds in run.seconds.items():
        if step in steps and math.isfinite(seconds):
            steps[step]["seconds"] = seconds
    return dict(sorted(steps.items()))
