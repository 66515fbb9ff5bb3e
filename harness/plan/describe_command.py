"""What a set of a command trainer is, in words."""

from __future__ import annotations

from collections.abc import Iterator

from harness.model import GLOBAL_BATCH, Command, Job, RankLauncher, Role
from harness.model.experiment import LOCAL_BATCH

PYTHON = "{python}"


def describe_command(command: Command) -> str:
    """``train.py by torchrun, probed``."""
    words = [each for each in command.argv if not each.startswith("-")]
    # The Python itself says nothing of what it runs.
    program = next((each for each in words if each != PYTHON), command.argv[0])
    by = "" if command.launcher is RankLauncher.NONE else f" by {command.launcher.value}"
    return f"{program}{by}, {'probed' if command.probed else 'curves only'}"


def serves_command(job: Job, control: Job) -> str:
    """What a set does otherwise than the control that it is judged against."""
    on = f"{job.spec.parallelism} on {job.world_size} rank{'s' * (job.world_size > 1)}"
    if job.role is Role.CONTROL:
        return f"control: {on}"
    if job.role is Role.ANCHOR:
        return f"anchor: the control is itself judged against {on}"
    return ", ".join(_differences(job, control)) or f"the control's own settings, {on}"


def _differences(job: Job, control: Job) -> Iterator[str]:
    ours, theirs = job.spec, control.spec
    if ours.parallelism != theirs.parallelism:
        yield f"{ours.parallelism} against {theirs.parallelism}"
    accumulated = (job.gradient_accumulation_steps, control.gradient_accumulation_steps)
    if accumulated[0] != accumulated[1]:
        yield f"{accumulated[0]} x accumulated against {accumulated[1]} x"
    if job.local_batch_size != control.local_batch_size:
        yield f"local batch {job.local_batch_size} against {control.local_batch_size}"
    if ours.train_config.path != theirs.train_config.path:
        yield f"{ours.train_config.path} against {theirs.train_config.path}"
    for key in sorted(ours.overrides.keys() | theirs.overrides.keys()):
        if key in (LOCAL_BATCH, GLOBAL_BATCH):  # told above
            continue
        value, other = ours.setting(key), theirs.setting(key)
        if value != other:
            yield f"{key} {value} against {other}"
    if ours.toolchain != theirs.toolchain:
        yield f"{ours.toolchain} against {theirs.toolchain}"
