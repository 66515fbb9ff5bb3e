"""A ``Command`` as the ``[trainer]`` table of an experiment file in another folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from converge_harness.model import SetSpec
from converge_harness.trainers.base import normal_path
from converge_harness.trainers.command.program import paths_in, texts_of, with_files_of
from converge_harness.trainers.command.settings import Command, RankLauncher


def written_table(
    specs: Sequence[SetSpec], placed: Mapping[Path, str]
) -> tuple[dict[str, Any], str]:
    """The keys of ``[trainer]``, or a clause that says why there is no such table.

    Arguments and variables that name a file outside of the program's folder, or by an absolute
    path, name it by its new place.

    Args:
        specs: sets of one file, trained by its ``[trainer]``.
        placed: by the ``normal_path`` of each source, where it lies seen from the new file's
            folder.
    """
    command: Command = specs[0].trainer.settings
    if why := _fixed_elsewhere(specs, placed):
        return {}, why

    def moved(text: str) -> str:
        return _moved(text, command.folder, placed)

    listed = dict.fromkeys(
        placed[normal_path(source)] for spec in specs for source in _only_listed(spec)
    )
    table = {
        "command": list(map(moved, command.argv)),
        "launcher": command.launcher.value,
        **({} if command.probed else _of_curves(command)),
        **({"files": list(listed)} if listed else {}),
    }
    if command.environment:
        table["environment"] = {name: moved(each) for name, each in command.environment.items()}
    if command.checkpoints is not None:
        form = asdict(command.checkpoints)
        table["checkpoints"] = {key: value for key, value in form.items() if value is not None}
    return table, ""


def _of_curves(command: Command) -> dict[str, Any]:
    means = {} if command.mean_over == 1 else {"mean_over": command.mean_over or _UNKNOWN_MEAN}
    return {
        "probe": False,
        "curves": command.curves,
        **({"columns": dict(command.columns)} if command.columns else {}),
        **means,
    }


_UNKNOWN_MEAN = "since the last row"
"""``mean_over`` of the table, which is 0 in a ``Command``."""


def _only_listed(spec: SetSpec) -> tuple[Path, ...]:
    """Sources that the template does not show to be files: those under ``files``, and modules."""
    command: Command = spec.trainer.settings
    shown = with_files_of(replace(command, sources=()), spec).sources
    return tuple(each for each in command.sources if each not in shown)


def _fixed_elsewhere(specs: Sequence[SetSpec], placed: Mapping[Path, str]) -> str:
    """Why the files cannot be named by their new places; empty if they can."""
    for spec in specs:
        command: Command = spec.trainer.settings
        if command.launcher is RankLauncher.SRUN:
            return "is started by srun, which only Slurm has: give it launcher = 'torchrun'"
        for text in (*command.argv, *command.environment.values()):
            for filled in texts_of(text, spec) if "{" in text else ():
                if _moved(filled, command.folder, placed) != filled:
                    return (
                        f"gets {filled!r} by {text!r}, a path that nobody else has: put the file "
                        f"below {command.folder}, and write its path from there"
                    )
    return ""


def _moved(text: str, folder: Path, placed: Mapping[Path, str]) -> str:
    """An argument with the new place of the file that it names, if that is another."""
    for path in paths_in(text):
        place = placed.get(normal_path(folder / path))
        if place is not None and os.path.normpath(path) != place:
            return text.removesuffix(path) + place
    return text
