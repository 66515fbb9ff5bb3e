"""The ``Command`` of a command trainer, and its templates: texts with placeholders in braces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from converge_harness.run_folder.checkpoints import CheckpointForm
from converge_harness.run_folder.weight_mapping import WeightMapping


class RankLauncher(StrEnum):
    """What starts the ranks of a command trainer: ``[trainer] launcher``."""

    TORCHRUN = "torchrun"
    COMPOSER = "composer"
    DEEPSPEED = "deepspeed"
    MPIRUN = "mpirun"
    SRUN = "srun"
    """Slurm's own, with one task per rank; the template is the whole argv of a task."""
    NONE = "none"
    """Nothing: the template is the whole argv, and starts its ranks itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a set's program is called, and what it writes.

    Everything here except ``folder`` can change numbers or evidence, and so is part of a job's
    identity.
    """

    argv: tuple[str, ...]
    """The template: what follows the launcher's own options, or with ``NONE`` the whole argv. Each
    entry is one argument, in which ``{name}`` stands for a value (docs/any-trainer.md); ``{{`` and
    ``}}`` are braces. An entry ``{*config.KEY}`` is as many arguments as a list of the train config
    has. No shell ever sees it."""
    folder: Path
    """Absolute path of the program's working directory."""
    launcher: RankLauncher = RankLauncher.TORCHRUN
    probed: bool = True
    """Whether the program calls ``probe``, which then leaves all evidence; else its
    curve is the only evidence."""
    curves: str | None = None
    """Template of that curve's path, ``{output}/…``, in any format that ``converge compare`` reads;
    None for a probed program.
    """
    columns: Mapping[str, str] = field(default_factory=dict)
    """By signal or ``step``, its name in the curve; others are found by their usual names."""
    mean_over: int = 1
    """As in ``Evidence``: over how many steps a loss in the curve is the mean."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of its ranks; values are templates."""
    checkpoints: CheckpointForm | None = None
    """What its checkpoints look like; None: not configured, so it cannot be resumed."""
    weights: WeightMapping | None = None
    """Names in the checkpoint of another trainer's model, from which it starts."""
    sources: tuple[Path, ...] = ()
    """Absolute paths of files whose content is part of the identity: existing files in the
    template, and those listed in ``files``.
    """


CHECKPOINT_DIR = "checkpoint_dir"
CHECKPOINT_EVERY = "checkpoint_every"
RESUME_FROM = "resume_from"
STOP_AT = "stop_at"
OF_CHECKPOINTS = (CHECKPOINT_DIR, CHECKPOINT_EVERY, RESUME_FROM, STOP_AT)
"""Placeholders by which a program is resumed."""
PLACEHOLDERS = (
    "steps",
    "seed",
    "output",
    "data",
    "python",
    "name",
    "ranks",
    "dp",
    "dp_replicate",
    "dp_shard",
    "tp",
    "cp",
    "pp",
    "ep",
    "local_batch_size",
    "global_batch_size",
    "gradient_accumulation_steps",
    "seq_len",
    *OF_CHECKPOINTS,
)
"""Placeholders other than keys of the train config."""
CONFIG = "config."
"""Prefix of placeholders for the train config: ``{config.zero.stage}``."""
_LIST = re.compile(r"\{\*config\.(?P<key>[^{}]*)\}")
_PART = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")


def passed(command: Command) -> frozenset[str]:
    """The names of all placeholders in the command and its environment."""
    found: set[str] = set()
    for text in (*command.argv, *command.environment.values()):
        with suppress(TemplateError):  # which is reported for the file
            found.update(placeholders(text))
    return frozenset(found)


class TemplateError(ValueError):
    """A template that cannot be filled, and how to write it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def listed_key(template: str) -> str | None:
    """The key whose list the whole argument stands for (``{*config.KEY}``); None for others."""
    match = _LIST.fullmatch(template)
    return match and match["key"]


def placeholders(template: str) -> tuple[str, ...]:
    """The names of a template's placeholders, in order, known or not.

    Raises:
        TemplateError: a brace is unmatched (literal braces have to be doubled), or ``{*…}`` is not
        the whole argument, or no key of the train config.
    """
    if (key := listed_key(template)) is not None:
        return (CONFIG + key,)
    found = []
    for part in _PART.finditer(template):
        name = part["name"]
        if name is not None and name.startswith("*"):
            raise TemplateError(
                f"{{{name}}} is no argument of its own from the train config",
                f'write "{{*{CONFIG}KEY}}" as a whole argument',
            )
        if name is not None:
            found.append(name)
        elif part[0] in "{}":
            raise TemplateError(
                f"the brace {part[0]!r} at character {part.start() + 1} is unmatched",
                "write {{ and }} for braces",
            )
    return tuple(found)


def fill(template: str, value_of: Callable[[str], str]) -> str:
    """The template with placeholders replaced by their values, and doubled braces by single ones.

    Values themselves are not expanded. Raises what ``value_of`` raises, and TemplateError as
    ``placeholders`` does. The template of a list (``listed_key``) is several arguments, and not for
    this function.
    """
    placeholders(template)

    def filled(part: re.Match[str]) -> str:
        return part[0][0] if part["name"] is None else value_of(part["name"])

    return _PART.sub(filled, template)
