"""Which A/A repeats a file gets, and which of those that it asks for can be made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.errors import Problem
from harness.experiment.sets import Where
from harness.experiment.tables import FileTable
from harness.experiment.trainer import CommandTable, TitanTable
from harness.model import (
    CURVE_REPEATS,
    PROBED_REPEATS,
    Repeat,
    RepeatKind,
    SetSpec,
)


def repeats_of(top: FileTable, trainer: TitanTable | CommandTable) -> tuple[Repeat, ...]:
    """The file's own, else those that its trainer can make.

    torchtitan's defaults leave out by themselves what its loader cannot do (``harness.plan``).
    """
    if "repeats" in top.model_fields_set or isinstance(trainer, TitanTable):
        return tuple(top.repeats)
    return PROBED_REPEATS if trainer.probe else CURVE_REPEATS


def repeat_problems(
    where: Where,
    top: FileTable,
    trainer: TitanTable | CommandTable,
    controls: Sequence[SetSpec],
) -> Iterator[Problem]:
    """Repeats that the file asks for and nobody can make."""
    if "repeats" not in top.model_fields_set:
        return
    for index, repeat in enumerate(top.repeats):
        if isinstance(trainer, CommandTable):
            why, hint = _not_by_command(repeat, trainer)
        else:
            why, hint = _not_by_loader(repeat, controls)
        if why:
            yield Problem(where(f"repeats[{index}]"), f"'{repeat}' {why}", hint)


def _not_by_command(repeat: Repeat, trainer: CommandTable) -> tuple[str, str]:
    """Why a command trainer's repeat cannot be made, and a hint; both empty when it can."""
    if repeat.kind is RepeatKind.PERMUTE:
        why = "cannot be made of a command trainer: its program deals out the samples of a batch"
        return why, "use rerun and ulp repeats" if trainer.probe else "use rerun"
    if repeat.kind is RepeatKind.ULP and not trainer.probe:
        return "cannot be made: only the probe moves initial weights", "use rerun"
    return "", ""


def _not_by_loader(repeat: Repeat, controls: Sequence[SetSpec]) -> tuple[str, str]:
    """The same for torchtitan: only our own loader can deal a global batch out in another order."""
    others = [spec.name for spec in controls if not spec.train_config.own_loader]
    if not others or repeat.kind is not RepeatKind.PERMUTE:
        return "", ""
    why = (
        f"cannot be made of {', '.join(map(repr, others))}: its train config has no "
        "[converge.data] that converge's own loader reads, and only that can deal the samples of a "
        "batch out in another order"
    )
    return why, "leave it out, or use rerun and ulp repeats"
