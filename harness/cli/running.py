"""Bringing the jobs of a plan to their records, with what a person sees meanwhile."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console

from harness import corpus
from harness.cli import matrix
from harness.cli.display import Display
from harness.launch import RunOptions, run_plan
from harness.launch.events import Preparing
from harness.model import Plan, RunRecord, SyntheticData
from harness.store import Store
from harness.surroundings import gpu_models


@dataclass(frozen=True, slots=True)
class Ran:
    """What running a plan came to."""

    records: tuple[RunRecord, ...]
    """In the plan's order."""
    data: Mapping[SyntheticData, corpus.PreparedData]


def gpu_ids() -> tuple[int, ...]:
    """GPUs that ranks may use; empty: they run on the CPU."""
    return tuple(range(len(gpu_models())))


def run_jobs(plan: Plan, store: Store, arguments: argparse.Namespace, console: Console) -> Ran:
    """Bring every job of the plan to a record; finished ones are reused.

    ``arguments`` are those of a command that runs: ``fresh`` and ``cold``.
    """
    with Display(console) as display:
        display(Preparing(time.time(), f"{plan.experiment.name}: {len(plan.jobs)} jobs"))
        data = matrix.prepare_data(plan, store)
        options = RunOptions(
            data={values: prepared.folder for values, prepared in data.items()},
            gpus=gpu_ids(),
            fresh=arguments.fresh,
            warm=not arguments.cold,
        )
        return Ran(run_plan(plan, store, options, display), data)
