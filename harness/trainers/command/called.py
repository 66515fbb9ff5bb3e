"""What of a job reaches the program of the user's that trains it, and what is called at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness.model import Command, Job, Parallelism, RankLauncher
from harness.model.template import CONFIG, placeholders
from harness.trainers.command.argv import command_of

PYTHON = "{python}"
OF_THE_RUN = frozenset({"output", "data", "python", "name"})
"""Placeholders that do not say how to train, or only as the toolchain and the corpus do."""


def describe_command(command: Command) -> str:
    """``train.py by torchrun, probed``."""
    words = [each for each in command.argv if not each.startswith("-")]
    # The Python itself says nothing of what it runs.
    program = next((each for each in words if each != PYTHON), command.argv[0])
    by = "" if command.launcher is RankLauncher.NONE else f" by {command.launcher.value}"
    return f"{program}{by}, {'probed' if command.probed else 'curves only'}"


def told(job: Job) -> dict[str, Any]:
    """Everything by which a call may differ from another of the same command: values by name.

    Raises TypeError for jobs of other trainers.
    """
    command = command_of(job.spec)
    names = set(_names(command)) - OF_THE_RUN
    known = _known(job)
    values = {
        name: job.spec.setting(name.removeprefix(CONFIG))
        if name.startswith(CONFIG)
        else known[name]
        for name in names
    }
    data = job.spec.train_config.data
    # Without a launcher nothing but the call says how many ranks there are to be.
    ranks = {} if command.launcher is RankLauncher.NONE else {"ranks": job.world_size}
    return {**values, **ranks, "python": str(job.toolchain.python), "data": data}


def is_told_its_ranks(job: Job, control: Job) -> bool:
    """Whether a job of more or fewer ranks than its control's is called with something to say so.

    That is a launcher, a number of ranks, a degree, or a config value other than the control's.
    Raises TypeError for jobs of other trainers.
    """
    command = command_of(job.spec)
    if command.launcher is not RankLauncher.NONE:
        return True
    names = {name for text in _handed_over(command) for name in placeholders(text)}
    keys = {name.removeprefix(CONFIG) for name in names if name.startswith(CONFIG)}
    return bool(names & {"ranks", "dp", *asdict(Parallelism())}) or any(
        job.spec.setting(key) != control.spec.setting(key) for key in keys
    )


def _known(job: Job) -> dict[str, Any]:
    degrees = job.spec.parallelism
    return {
        **asdict(degrees),
        "dp": degrees.dp,
        "ranks": job.world_size,
        "steps": job.steps,
        "seed": job.seed,
        "local_batch_size": job.local_batch_size,
        "global_batch_size": job.global_batch_size,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "seq_len": job.seq_len,
    }


def _names(command: Command) -> Iterator[str]:
    """Those of the curve, too: a program may leave several."""
    for text in (*_handed_over(command), command.curves or ""):
        yield from placeholders(text)


def _handed_over(command: Command) -> tuple[str, ...]:
    return (*command.argv, *command.environment.values())
