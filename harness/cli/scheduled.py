"""What the commands for jobs of a scheduler share: their plan, and texts on jobs.

They find an experiment's jobs from any shell, by the arguments that identify the plan: experiment,
store and cluster.
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from converge_harness.cli.options import (
    ONLY_SETS,
    add_calibration,
    add_cluster,
    add_experiment,
    names,
    plan_of,
)
from converge_harness.errors import ConfigError, Problem
from converge_harness.model import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converge_harness.model import Plan

EXAMPLES = """\
examples:
  converge plan experiments/llama3_8b.toml --dry-run
  converge submit experiments/llama3_8b.toml --launcher slurm
  converge status experiments/llama3_8b.toml --launcher slurm
  converge collect experiments/llama3_8b.toml --launcher slurm --out reports/llama3_8b
  converge cancel experiments/llama3_8b.toml --launcher slurm --only fsdp8_tp2_pp2
  converge submit experiments/llama3_8b.toml --launcher kubernetes --objects objects"""


def add_plan(parser: argparse.ArgumentParser, only: str = ONLY_SETS) -> None:
    """Add the arguments that identify a plan, by which any shell finds its jobs."""
    add_experiment(parser, only)
    add_cluster(parser)
    add_calibration(parser)


def scheduled_plan(arguments: argparse.Namespace, *, whole: bool = False) -> Plan:
    """The plan of the arguments, for jobs of a scheduler; ``whole``: without ``--only``.

    Raises ConfigError also where its launcher is none, or cannot start what its trainer needs.
    """
    plan = plan_of(arguments, whole=whole)
    from converge_harness.trainers import trainer_of

    here = f"on this machine: converge run {shlex.quote(str(arguments.experiment))}"
    for spec in (job.spec for job in plan.jobs):
        scheduler = plan.experiment.launcher
        scheduler = Launcher.SLURM if scheduler is Launcher.LOCAL else scheduler
        why, hint = trainer_of(spec).why_not_under(scheduler, spec.trainer)
        if why:
            raise ConfigError(
                Problem(
                    f"{arguments.experiment}: launcher",
                    f"has to be 'slurm' for `converge {arguments.command}`, {why}",
                    "; ".join(filter(None, (hint, here))),
                )
            )
    if plan.experiment.launcher is Launcher.LOCAL:
        raise ConfigError(
            Problem(
                f"{arguments.experiment}: launcher",
                f"is local, and `converge {arguments.command}` is for jobs of a scheduler",
                f'add --launcher slurm, or launcher = "slurm" to the file; {here}',
            )
        )
    return plan


def again(command: str, arguments: argparse.Namespace) -> str:
    """Another command for the same plan, as a user would type it."""
    command_line = ["converge", command, str(arguments.experiment)]
    only = names(arguments.only)
    command_line += ["--only", *only] if only else []
    for option in ("launcher", "cluster", "store", "calibration"):
        value = getattr(arguments, option)
        command_line += [f"--{option}", str(value)] if value is not None else []
    return shlex.join(command_line)


def mend(plan: Plan, refusals: Iterable[str]) -> str:
    """What to do when Slurm refused jobs, with these messages, before they are submitted again."""
    from converge_harness.launch.slurm.commands import LAUNCH_FAILED, TOO_MANY_REQUEUES

    messages = list(refusals)
    if all(TOO_MANY_REQUEUES in each for each in messages):
        return "find out why Slurm requeues the job (slurm.log in its run folder)"
    if all(LAUNCH_FAILED.search(each) for each in messages):
        return "find out why the node cannot launch the job (the log of slurmd on the node)"
    return f"fix [cluster] of {plan.experiment.path}, or your own cluster file"
